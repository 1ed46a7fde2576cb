"""`penstock run --baseline`: the same program with torch's own loader, measured before it runs with penstock's.

A program cannot be run half and then once more in one process. So its beginning is run in a process of its own, in a
session of its own, without input, its output thrown away, and ended in the middle: after 10 batches of warm-up and
200 more, or those of 15 seconds. Whatever the program does at its beginning (files, logs, downloads) it does twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.launch.stretch import LEAST_BATCHES, MOST_BATCHES, WARM_UP, Stopwatch, stretch_of
from penstock.observe.baseline import Baseline, Stretch

_LIMIT_S = 180.0
"""The program's start, the warm-up and the stretch together take no longer: after that it is ended, wherever it is."""


class Comparison:
    """Runs a program's beginning with torch's loader, then times the same stretch in this process.

    Args:
        command: as for `penstock run`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._theirs: dict[str, Any] = {}
        self._problem = ""
        self._ours: Stopwatch | None = None

    def measure_torch(self) -> None:
        """Run the program's beginning with torch's own loader. Takes three minutes at most."""
        with tempfile.TemporaryDirectory(prefix="penstock-baseline-") as folder:
            result, errors = Path(folder) / "stretch.json", Path(folder) / "stderr"
            code = self._run(result, errors)
            if result.exists():
                self._theirs = json.loads(result.read_text(encoding="utf-8"))
            last = (errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]
        batches = len(self._theirs.get("laps_s", ()))
        if batches >= LEAST_BATCHES:
            self._ours = Stopwatch(batches)
        elif code is None:
            self._problem = f"with torch's loader there were {batches} batches in {_LIMIT_S:.0f} s, which is too few"
        elif code:
            self._problem = f"with torch's loader the program ended with exit code {code} ({last})"
        else:
            self._problem = (
                f"the program is too short: it has {batches} batches after the first {WARM_UP}, and {LEAST_BATCHES} "
                "are needed"
            )

    def install(self) -> None:
        """Begin to time this process's loaders, once torch is imported and its loader replaced."""
        if self._ours is not None:
            self._ours.install()

    def result(self) -> Baseline:
        """Return what was found, when the program is over."""
        theirs = self._theirs
        ours = self._ours
        if ours is None or len(ours.laps_s) < LEAST_BATCHES:
            return Baseline(warm_up=WARM_UP, problem=self._problem or "the run itself had too few batches")
        batches = min(len(theirs["laps_s"]), len(ours.laps_s))
        samples = theirs["samples"] if batches == len(theirs["laps_s"]) else ours.samples(batches)
        return Baseline(
            warm_up=WARM_UP,
            torch=Stretch.of(theirs["laps_s"][:batches], theirs["loading_s"][:batches], samples),
            penstock=stretch_of(ours, batches),
        )

    def _run(self, result: Path, errors: Path) -> int | None:
        """Return the exit code, or None when it took too long."""
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.launch.stretch", str(result), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                return process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):  # its workers, which are nobody's any more
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def announcement(command: Sequence[str]) -> str:
    """Return what is said before the program is run twice."""
    return (
        f"penstock: running the beginning of {command[1] if command[0] == '-m' else command[0]} with torch's own "
        f"loader first ({WARM_UP} batches of warm-up and up to {MOST_BATCHES} more); its output is hidden, and what it "
        "does at its start is done twice"
    )
