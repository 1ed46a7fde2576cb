"""`penstock run --baseline`: times the beginning of a program with torch's own loader, then with penstock's.

One process cannot run half of a program and then start it again. So a child process runs its beginning with torch's
loader (see torch_loader_run.py), in its own session, without input, its output discarded. It is ended after 10 warm-up
batches and 200 more, or the batches of 15 seconds. Whatever the program does at its beginning (files, logs, downloads)
happens twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.interpreter import arguments_of, path_of_command
from penstock.core.urls import redact
from penstock.launch.stopwatch import MAX_BATCHES, MIN_BATCHES, WARMUP_BATCHES, Stopwatch
from penstock.observe.record.baseline import Baseline, TimingWindow

_MAIN = "import sys; from penstock.launch.torch_loader_run import main; main(sys.argv[1:])"

_LIMIT_S = 180.0
"""The child process is killed after this time, wherever it is."""

_PROGRESS_S = 5.0


class BaselineRun:
    """Runs a program's beginning with torch's loader, then times the same number of batches in this process.

    Args:
        command: as for `penstock run`.
        quiet: whether to print nothing.
    """

    def __init__(self, command: Sequence[str], *, quiet: bool = False) -> None:
        self._command = command
        self._quiet = quiet
        self._torch_timing: dict[str, Any] = {}
        self._problem = ""
        self._stopwatch: Stopwatch | None = None

    def measure_torch(self) -> None:
        """Run the program's beginning with torch's own loader. Takes three minutes at most."""
        with tempfile.TemporaryDirectory(prefix="penstock-baseline-") as folder:
            result, errors = Path(folder) / "timing.json", Path(folder) / "stderr"
            code = self._run_child(result, errors)
            if result.exists():
                self._torch_timing = json.loads(result.read_text(encoding="utf-8"))
            last_line = (errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]
        batches = len(self._torch_timing.get("batch_intervals_s", ()))
        if batches >= MIN_BATCHES:
            self._stopwatch = Stopwatch(batches)
        elif code is None:
            self._problem = f"with torch's loader there were only {batches} batches in {_LIMIT_S:.0f} s"
        elif code:
            self._problem = f"with torch's loader the program ended with exit code {code} ({redact(last_line)})"
        else:
            self._problem = (
                f"the program is too short: torch's DataLoader had {batches} batches after the first {WARMUP_BATCHES}, "
                f"and {MIN_BATCHES} are needed; a loader that the program imports from penstock is not compared"
            )

    def install(self) -> None:
        """Start to time this process's loaders. Called once torch is imported and its loader replaced."""
        if self._stopwatch is not None:
            self._stopwatch.install()

    def result(self) -> Baseline:
        """Return the comparison. Called when the program is over."""
        timing, stopwatch = self._torch_timing, self._stopwatch
        if stopwatch is None or len(stopwatch.batch_intervals_s) < MIN_BATCHES:
            return Baseline(
                warmup_batches=WARMUP_BATCHES, problem=self._problem or "the run itself had too few batches"
            )
        batches = min(len(timing["batch_intervals_s"]), len(stopwatch.batch_intervals_s))
        left_alone = stopwatch.from_torch(batches)
        if left_alone == batches:
            problem = "nothing was replaced; the program's loaders were left alone, or fell back to torch's iterator"
            return Baseline(warmup_batches=WARMUP_BATCHES, problem=problem)
        is_whole = batches == len(timing["batch_intervals_s"])
        samples = timing["samples"] if is_whole else stopwatch.samples(batches)
        return Baseline(
            warmup_batches=WARMUP_BATCHES,
            torch=TimingWindow.of(timing["batch_intervals_s"][:batches], timing["batch_loading_s"][:batches], samples),
            penstock=stopwatch.window(batches),
            left_alone=left_alone,
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return a child's exit code, or None if it took too long; say every few seconds that it runs."""
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < _LIMIT_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(_PROGRESS_S, _LIMIT_S - waited_s))
            if not self._quiet:
                waited_s = time.monotonic() - began
                print(f"penstock: torch's own loader for {waited_s:.0f} s", file=sys.stderr, flush=True)
        return None

    def _run_child(self, result: Path, errors: Path) -> int | None:
        """Return the child's exit code, or None if it took too long."""
        flags = ["-P"] if sys.flags.safe_path else []
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *flags, *arguments_of(_MAIN, str(result), *self._command, path=path_of_command())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                return self._wait(process)
            finally:
                with contextlib.suppress(ProcessLookupError):  # its workers, which have outlived it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def announcement(command: Sequence[str]) -> str:
    """Return the message that is printed before the program runs twice."""
    return (
        f"penstock: running the beginning of {command[1] if command[0] == '-m' else command[0]} with torch's own "
        f"loader first ({WARMUP_BATCHES} batches of warm-up and up to {MAX_BATCHES} more); its output is hidden, and "
        "everything it does at its start happens twice"
    )
