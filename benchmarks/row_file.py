"""A report that is written after every row, and that a second call adds rows to (`--json FILE --resume`).

A row of several rounds is written after each of them, and a second call adds the rounds that are missing.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.observe.atomic_write import write_text_atomic

UNFINISHED = 3
"""The exit code of a program whose time was over before all rows were there."""

LEAST_ROUNDS = 2
"""A row with so many rounds is worth keeping: a second call has better things to do."""


class RowFile:
    """The report of a benchmark, and the file that it is kept in.

    Args:
        asked: what `add_options` parsed.
        report: the report without a row: what is an empty list, or None, has rows later.
    """

    def __init__(self, asked: argparse.Namespace, report: dict[str, Any]) -> None:
        self.report, self._file, self._began = report, asked.json, time.perf_counter()
        self._until, self._is_short = asked.until, False
        report["code"] = asked.code
        seconds = 0.0
        if asked.resume and self._file is not None and self._file.exists():
            before = json.loads(self._file.read_text())
            if _identity(before) == _identity(report):  # rows of other code or another machine are another report's
                report.update({name: measured(before[name]) for name, value in report.items() if value in ([], None)})
                seconds = before["seconds"]
        self._began -= seconds
        report["seconds"] = seconds

    def add(self, rows: str, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Add a row to `rows` and write, if it is not there. A failure is a row that says so; others are measured."""
        if self._find(rows, about) is not None:
            return
        try:
            found = measure()
        except Exception:  # noqa: BLE001
            found = _failure(about)
        self.report[rows].append({**about, **found})
        self.write()

    def add_rounds(
        self,
        rows: str,
        about: dict[str, Any],
        count: int,
        begin: Callable[[], Callable[[int], dict[str, Any]]],
        end: Callable[[], dict[str, Any]] = dict,
        share: float = 1.0,
    ) -> None:
        """Add rounds to the row of `about` until it has `count`, or `share` of the time that is left is over.

        Args:
            rows: the list of rows.
            about: what names the row.
            count: how many rounds it is to have.
            begin: prepares, and returns what measures a round, given its number.
            end: what the row says after the last round.
            share: of the time that is left.
        """
        row = self._find(rows, about)
        if row is not None and len(row["rounds"]) >= min(count, LEAST_ROUNDS):
            return
        if not self.has_time(0):
            return
        if row is None:
            row = {**about, "rounds": []}
        there, longest = row["rounds"], 0.0
        last = time.monotonic() + share * (self._until - time.monotonic())
        try:
            measure = begin()
            while len(there) < count and (not there or time.monotonic() + longest < last):
                began = time.monotonic()
                there.append(measure(len(there)))
                longest = max(longest, time.monotonic() - began)
                self._put(rows, row)
            row.update(end())
        except Exception:  # noqa: BLE001
            row.update(_failure(about))
        self._is_short |= len(there) < min(count, LEAST_ROUNDS)
        self._put(rows, row)

    def has_time(self, seconds: float) -> bool:
        """Return whether so much time is left; if not, the program ends unfinished."""
        self._is_short |= (is_short := time.monotonic() + seconds > self._until)
        return not is_short

    def exit_code(self) -> int:
        """Return 1 if a row says that it failed, `UNFINISHED` if rows are missing, and else 0."""
        lists = (value for value in self.report.values() if isinstance(value, list))
        return 1 if any("failed" in row for rows in lists for row in rows) else UNFINISHED if self._is_short else 0

    def write(self) -> None:
        """Write the rows that there are, with how long they took."""
        self.report["seconds"] = round(time.perf_counter() - self._began, 1)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(self._file, json.dumps(self.report, indent=1) + "\n", "--json")

    def _put(self, rows: str, row: dict[str, Any]) -> None:
        if not any(row is one for one in self.report[rows]):
            self.report[rows].append(row)
        self.write()

    def _find(self, rows: str, about: dict[str, Any]) -> dict[str, Any] | None:
        return next((row for row in self.report[rows] if about.items() <= row.items()), None)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --json and --resume, and what `benchmarks.gpu` gives its parts."""
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on with the rows that FILE lacks")
    parser.add_argument("--code", default="", help="what names the code; rows of other code are measured again")
    parser.add_argument("--until", type=float, default=float("inf"), help="when to end, of Python's time.monotonic()")


def measured(rows: Any) -> Any:
    """Return what need not be tried again."""
    return [row for row in rows if "failed" not in row] if isinstance(rows, list) else rows


def _failure(about: dict[str, Any]) -> dict[str, Any]:
    text = traceback.format_exc()
    print(f"{', '.join(map(str, about.values()))}: {text.splitlines()[-1]}", flush=True)
    return {"failed": text}


def _identity(report: dict[str, Any]) -> list[Any]:
    """Return what rows of one report have in common: not the kernel, driver and memory, which change between calls."""
    names = ("penstock", "python", "torch", "cuda", "gpu", "cpu", "cores")
    return [report["benchmark"], report["sizes"], report.get("code", ""), *(report["machine"].get(n) for n in names)]
