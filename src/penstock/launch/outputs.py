"""The outputs of a run: what is printed and written, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Where a run is written; None for not at all."""

    folder: Path | None = None
    """Where files are that the user has not named; made when they are written."""

    json_file: Path | None = None
    """run.json: the run as data."""

    html_file: Path | None = None
    """report.html: the report for a browser."""

    trace_file: Path | None = None
    """What happened to each batch, for Perfetto. Recorded only if this is given."""

    prometheus_port: int | None = None
    """Port of the Prometheus endpoint, on this machine only; 0 for any free port."""

    quiet: bool = False
    """Whether to print neither the panel nor the report."""

    def of_rank(self, ranks: Ranks) -> Outputs:
        """Return the outputs of one rank of several.

        Each rank has its own trace file and port. Each node has its own run.json and report, because nodes may share
        the folder.
        """
        trace_file, port = self.trace_file, self.prometheus_port
        if trace_file is not None and ranks.rank:
            trace_file = trace_file.with_name(f"{trace_file.stem}-rank{ranks.rank}{trace_file.suffix}")
        return replace(
            self,
            json_file=_on_node(self.json_file, ranks.node),
            html_file=_on_node(self.html_file, ranks.node),
            trace_file=trace_file,
            prometheus_port=port + ranks.local_rank if port else port,
        )


def _on_node(file: Path | None, node: int) -> Path | None:
    return file if file is None or node == 0 else file.with_name(f"{file.stem}.node{node}{file.suffix}")
