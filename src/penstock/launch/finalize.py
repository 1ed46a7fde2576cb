"""Writes the outputs at the end of a run: the report, run.json, report.html and the trace."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.core.errors import OptionError, PenstockError
from penstock.core.urls import printable, shown
from penstock.launch.outputs import Outputs
from penstock.observe.live.loader_registry import LoaderRegistry
from penstock.observe.meters import nvml
from penstock.observe.meters.clock import Clock
from penstock.observe.record.formatting import wrapped
from penstock.observe.record.run_record import RunRecord, save


def write_outputs(record: RunRecord, outputs: Outputs, *, is_last: bool) -> None:
    """Write the outputs of a run. An output that cannot be written is reported in one line, and the others are written.

    Called when a process of the run ends: by that process or, if it was killed, by its supervisor.

    Args:
        record: the record of the run; of several ranks, of all that have saved one.
        outputs: what to write.
        is_last: whether no other rank runs. Otherwise nothing is printed, and the files are replaced when the other
            ranks end.
    """
    if record.loaders:
        from penstock.observe.doctor.causes import findings_of_run  # no program must wait for it at its start

        record = replace(record, findings=findings_of_run(record))
    elif outputs.html_file is not None and outputs.html_file.parent == outputs.folder:
        outputs = replace(outputs, html_file=None)  # a page about no loader, which nobody has asked for
    if is_last and not outputs.quiet:
        from penstock.observe.report import text_report

        sys.stdout.flush()
        text = wrapped(text_report.render(record, details=False), sys.stderr)
        print(shown(text), end="", file=sys.stderr, flush=True)
        _print_note(nvml.missing_package() if "accelerators" in record.machine else None)
    files = (outputs.json_file, outputs.html_file)
    if outputs.folder is not None and any(file is not None and file.parent == outputs.folder for file in files):
        _print_error(functools.partial(_make_folder, outputs.folder))
    if outputs.json_file is not None:
        json_file = outputs.json_file
        _print_error(lambda: save(record, json_file))
    if outputs.html_file is not None:
        _print_error(lambda: _write_html(record, outputs))
    written = [str(file) for file in files if file is not None and file.exists()]
    if is_last and written and not outputs.quiet:
        print(f"  report: {printable(_relative(written[-1]))}", file=sys.stderr, flush=True)


def write_trace_file(registry: LoaderRegistry, clock: Clock, outputs: Outputs) -> None:
    """Write the trace, if it is wanted. Only the process itself has the events."""
    if outputs.trace_file is None:
        return
    from penstock.observe.record import perfetto_trace

    file = outputs.trace_file
    events = [loader.events() for loader in registry.iterated()]
    _print_error(lambda: perfetto_trace.write_trace(perfetto_trace.trace_of_events(events, clock, os.getpid()), file))


def _write_html(record: RunRecord, outputs: Outputs) -> None:
    from penstock.observe.report.write_html import write_html  # no program must wait for it at its start

    assert outputs.html_file is not None
    write_html(record, outputs.html_file)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise OptionError(f"{folder} cannot be made: {reason}; pass --json FILE and --html FILE elsewhere") from error


def _relative(file: str) -> str:
    """Return a path as seen from the current folder, if it is below it."""
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative


def _print_error(write: Callable[[], None]) -> None:
    try:
        write()
    except PenstockError as error:
        print(f"penstock: {shown(str(error))}", file=sys.stderr, flush=True)


def _print_note(sentence: str | None) -> None:
    if sentence is not None:
        print(f"penstock: {sentence}", file=sys.stderr, flush=True)
