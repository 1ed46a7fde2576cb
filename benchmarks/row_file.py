"""A report that is written after every row, and that a second call adds rows to (`--json FILE --resume`)."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.core.atomic_write import write_text_atomic


class RowFile:
    """The report of a benchmark, and the file that it is kept in.

    Args:
        asked: what `add_options` parsed.
        report: the report without a row: what is an empty list, or None, has rows later.
    """

    def __init__(self, asked: argparse.Namespace, report: dict[str, Any]) -> None:
        self.report, self._file, self._began = report, asked.json, time.perf_counter()
        seconds = 0.0
        if asked.resume and self._file is not None and self._file.exists():
            before = json.loads(self._file.read_text())
            if _identity(before) == _identity(report):  # rows of another machine are another report's
                report.update({name: measured(before[name]) for name, value in report.items() if value in ([], None)})
                seconds = before["seconds"]
        self._began -= seconds
        report["seconds"] = seconds

    def add(self, rows: str, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Add a row to `rows` and write. What fails is a row that says so, and leaves the other rows their chance."""
        try:
            found = measure()
        except Exception:  # noqa: BLE001
            found = {"failed": traceback.format_exc()}
            print(f"{', '.join(map(str, about.values()))}: {found['failed'].splitlines()[-1]}", flush=True)
        self.report[rows].append({**about, **found})
        self.write()

    def exit_code(self) -> int:
        """Return 1 if a row says that it failed."""
        lists = (value for value in self.report.values() if isinstance(value, list))
        return int(any("failed" in row for rows in lists for row in rows))

    def write(self) -> None:
        """Write the rows that there are, with how long they took."""
        self.report["seconds"] = round(time.perf_counter() - self._began, 1)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(self._file, json.dumps(self.report, indent=1) + "\n", "--json")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --json and --resume."""
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on with the rows that FILE lacks")


def measured(rows: Any) -> Any:
    """Return what need not be tried again."""
    return [row for row in rows if "failed" not in row] if isinstance(rows, list) else rows


def _identity(report: dict[str, Any]) -> list[Any]:
    """Return what rows of one report have in common: not the kernel, driver and memory, which change between calls."""
    names = ("penstock", "python", "torch", "cuda", "gpu", "cpu", "cores")
    return [report["benchmark"], report["sizes"], *(report["machine"].get(name) for name in names)]
