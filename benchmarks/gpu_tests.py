"""The tests that need a real GPU, one row each: `python -m benchmarks.gpu_tests [--tiny] [--json FILE [--resume]]`.

A row is written when its test has ended, so that a second call goes on with the tests that are missing or have failed.
With --tiny, for a dry run, it is one test that needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine_facts import facts_with_gpu
from benchmarks.row_file import RowFile, add_options

ROOT = Path(__file__).parents[1]
TESTS, TINY = "tests/cuda", "tests/device/test_oom.py"


class Recorder:
    """A plugin of pytest that leaves out the tests that have a row, and writes one for each of the others."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._rows = file.report["tests"]
        self._there = {row["test"] for row in self._rows}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what need not be run again."""
        items[:] = [item for item in items if item.nodeid not in self._there]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a row when a test has run, was skipped, or has failed; a teardown may still fail it."""
        if report.failed or report.when == "call" or report.skipped:
            if self._rows and self._rows[-1]["test"] == report.nodeid:
                self._rows.pop()
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            self._rows.append({**row, "failed": report.longreprtext} if report.failed else row)
            self._file.write()


def main() -> int:
    """Run, print, write; return 1 if a test failed or could not be collected."""
    import pytest

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tests", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="one test that needs no GPU")
    add_options(parser)
    asked = parser.parse_args()
    report: dict[str, Any] = {
        "benchmark": "gpu_tests", "sizes": "tiny" if asked.tiny else "full", "machine": facts_with_gpu(), "tests": []
    }  # fmt: skip
    file = RowFile(asked, report)
    tests = str(ROOT / (TINY if asked.tiny else TESTS))
    options = ["-q", "-p", "no:cacheprovider", f"--ignore={ROOT / TESTS / 'standin'}"]
    code = pytest.main([tests, *options], plugins=[Recorder(file)])
    file.write()
    rows = file.report["tests"]
    counts = {word: sum(row["outcome"] == word for row in rows) for word in ("passed", "failed", "skipped")}
    print(f"{', '.join(f'{count} {word}' for word, count in counts.items() if count)}; {file.report['seconds']:.0f} s")
    return int(code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or file.exit_code())


if __name__ == "__main__":
    sys.exit(main())
