"""Writes the outputs at the end of a run: the report, run.json, report.html and the trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

from penstock.core.errors import PenstockError
from penstock.launch.outputs import Outputs
from penstock.observe.doctor.causes import findings_of_run
from penstock.observe.live.loader_registry import LoaderRegistry
from penstock.observe.meters.clock import Clock
from penstock.observe.record import text_report
from penstock.observe.record.baseline import Baseline
from penstock.observe.record.compare_runs import Comparison
from penstock.observe.record.run_record import RunRecord, save
from penstock.observe.record.run_summary import RunSummary


def write_outputs(record: RunRecord, outputs: Outputs, *, is_last: bool) -> None:
    """Write the outputs of a run. An output that cannot be written is reported in one line, and the others are written.

    Called when a process of the run ends: by that process or, if it was killed, by its supervisor.

    Args:
        record: the record of the run; of several ranks, of all that have saved one.
        outputs: what to write.
        is_last: whether no other rank runs. Otherwise nothing is printed, and the files are replaced when the other
            ranks end.
    """
    record = replace(record, findings=findings_of_run(record))
    if is_last and not outputs.quiet:
        sys.stdout.flush()
        print(text_report.render(record), end="", file=sys.stderr, flush=True)
    if outputs.json_file is not None:
        json_file = outputs.json_file
        _print_error(lambda: save(record, json_file))
    if outputs.html_file is not None:
        _print_error(lambda: _write_html(record, outputs))


def write_trace_file(registry: LoaderRegistry, clock: Clock, outputs: Outputs) -> None:
    """Write the trace, if it is wanted. Only the process itself has the events."""
    if outputs.trace_file is None:
        return
    from penstock.observe.record import perfetto_trace

    file = outputs.trace_file
    events = [loader.events() for loader in registry.iterated()]
    _print_error(lambda: perfetto_trace.write_trace(perfetto_trace.trace_of_events(events, clock, os.getpid()), file))


def _write_html(record: RunRecord, outputs: Outputs) -> None:
    from penstock.observe.page import write_html  # imports plotly, for which no program must wait at its start

    assert outputs.html_file is not None
    write_html(record, outputs.html_file, _baseline_comparison(record.baseline))


def _baseline_comparison(baseline: Baseline | None) -> Comparison | None:
    """Return the comparison with torch's own loader, if there is one."""
    if baseline is None or baseline.torch is None:
        return None
    window, verdict = baseline.torch, baseline.verdict()
    reference = RunSummary(
        name="torch's own DataLoader",
        samples_per_s=window.samples / window.seconds if window.samples and window.seconds else 0.0,
        stall_fraction=window.stall_fraction,
        batch_s=window.batch_s,
    )
    return Comparison(
        reference=reference,
        caveats=(f"The reference is {window.batches} batches from the beginning of the run, after a warm-up.",),
        verdict=f"{verdict[:1].upper()}{verdict[1:]}.",
    )


def _print_error(write: Callable[[], None]) -> None:
    try:
        write()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr, flush=True)
