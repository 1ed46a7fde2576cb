"""What is written at the end of a run: the one place for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.observe import report
from penstock.observe.record import RunRecord, save


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is to be written."""

    json_file: Path | None
    """Where run.json goes; None for nowhere."""

    quiet: bool = False
    """Whether to print nothing."""


def write(record: RunRecord, wanted: Wanted, *, is_last: bool) -> None:
    """Write everything about a run that is over.

    Called when a process of the run ends: in that process, or, if it was killed, in the one that kept watch over it.

    Args:
        record: what there is; of several ranks, of all that have written something.
        wanted: what is to be written.
        is_last: whether this is the whole run. Otherwise other ranks still run, files are written again when they
            end, and nothing is printed.
    """
    if is_last and not wanted.quiet:
        sys.stdout.flush()
        print(report.render(record), end="", file=sys.stderr, flush=True)
    if wanted.json_file is not None:
        try:
            save(record, wanted.json_file)
        except PenstockError as error:
            print(f"penstock: {error}", file=sys.stderr, flush=True)
