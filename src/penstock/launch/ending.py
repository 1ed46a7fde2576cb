"""What is written at the end of a run: the one place for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

from penstock.core.errors import PenstockError
from penstock.launch.outputs import Outputs
from penstock.observe import report
from penstock.observe.baseline import Baseline
from penstock.observe.clock import Clock
from penstock.observe.compare import Comparison
from penstock.observe.diagnose import findings_of_run
from penstock.observe.record import RunRecord, save
from penstock.observe.watch import Watch


def write(record: RunRecord, outputs: Outputs, *, is_last: bool) -> None:
    """Write everything about a run that is over; what cannot be written is told in a line, and the rest is written.

    Called when a process of the run ends: in that process, or, if it was killed, in the one that kept watch over it.

    Args:
        record: what there is; of several ranks, of all that have written something.
        outputs: what is to be written.
        is_last: whether this is the whole run. Otherwise other ranks still run, files are written again when they
            end, and nothing is printed.
    """
    record = replace(record, findings=findings_of_run(record))
    if is_last and not outputs.quiet:
        sys.stdout.flush()
        print(report.render(record), end="", file=sys.stderr, flush=True)
    if outputs.json_file is not None:
        json_file = outputs.json_file
        _tell(lambda: save(record, json_file))
    if outputs.html_file is not None:
        _tell(lambda: _write_html(record, outputs))


def write_trace(watch: Watch, clock: Clock, outputs: Outputs) -> None:
    """Write what happened to each batch, if that is wanted; only the process itself knows it."""
    if outputs.trace_file is None:
        return
    from penstock.observe import trace

    file = outputs.trace_file
    events = [loader.trace() for loader in watch.loaders]
    _tell(lambda: trace.write(trace.of_events(events, clock, os.getpid()), file))


def _write_html(record: RunRecord, outputs: Outputs) -> None:
    from penstock.observe.page import write_html  # plotly, which no program shall wait for at its start

    assert outputs.html_file is not None
    write_html(record, outputs.html_file, None if record.baseline is None else _against(record.baseline))


def _against(baseline: Baseline) -> Comparison | None:
    """Return torch's own loader as what the run is compared with."""
    theirs = baseline.torch
    if theirs is None:
        return None
    return Comparison(
        name="torch's own DataLoader",
        samples_per_s=theirs.samples / theirs.seconds if theirs.samples and theirs.seconds else 0.0,
        waited_share=theirs.waited_share,
        batch_s=theirs.batch_s,
        caveats=(f"The other side is {theirs.batches} batches from the run's beginning, after a warm-up.",),
        verdict=f"{baseline.verdict()[:1].upper()}{baseline.verdict()[1:]}.",
    )


def _tell(write: Callable[[], None]) -> None:
    try:
        write()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr, flush=True)
