"""What is written of a run, and where."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.observe.clock import Clock
from penstock.observe.record import RunRecord, save
from penstock.observe.watch import Watch


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Where a run goes; None for nowhere."""

    json_file: Path | None = None
    """The run as data."""

    html_file: Path | None = None
    """Its report."""

    trace_file: Path | None = None
    """What happened to each batch, for Perfetto. Recorded only where this is given."""

    prometheus_port: int | None = None
    """Where live numbers are served, on this machine only; 0 for any free port."""

    def of_rank(self, environment: Mapping[str, str]) -> Outputs:
        """Return the outputs of one rank of several on this machine: a trace file and a port of its own.

        >>> other = Outputs(trace_file=Path("t.json"), prometheus_port=9000).of_rank({"RANK": "3", "LOCAL_RANK": "1"})
        >>> str(other.trace_file), other.prometheus_port
        ('t-rank3.json', 9001)
        """
        rank, local_rank = (environment.get(name, "0") for name in ("RANK", "LOCAL_RANK"))
        file, port = self.trace_file, self.prometheus_port
        if file is not None and rank != "0":
            file = file.with_name(f"{file.stem}-rank{rank}{file.suffix}")
        if port and local_rank.isdigit():
            port += int(local_rank)
        return replace(self, trace_file=file, prometheus_port=port)

    def write(self, record: RunRecord, watch: Watch, clock: Clock) -> None:
        """Write what is to be written at the end; what cannot be written is told in a line, and the rest is written."""
        if self.json_file is not None:
            file = self.json_file
            _tell(lambda: save(record, file))
        if self.html_file is not None:
            _tell(lambda: self._write_html(record))
        if self.trace_file is not None:
            _tell(lambda: self._write_trace(watch, clock))

    def _write_html(self, record: RunRecord) -> None:
        from penstock.observe.page import write_html  # plotly, which no program shall wait for at its start

        assert self.html_file is not None
        write_html(record, self.html_file)

    def _write_trace(self, watch: Watch, clock: Clock) -> None:
        from penstock.observe import trace

        assert self.trace_file is not None
        events = [loader.trace() for loader in watch.loaders]
        trace.write(trace.of_events(events, clock, os.getpid()), self.trace_file)


def _tell(write: Callable[[], None]) -> None:
    try:
        write()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
