"""Runs the beginning of a program with torch's own DataLoader and times it; the child process of baseline_run.py.

The file that it is told to write then holds {"batch_intervals_s", "batch_loading_s", "samples"}, see stopwatch.py. When
the stopwatch has timed enough batches, the process ends by `os._exit`, in the middle of the program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.launch.patch_torch import on_torch_import
from penstock.launch.program import load_program
from penstock.launch.stopwatch import LONG_ENOUGH_S, MAX_BATCHES, Stopwatch


def main(argv: Sequence[str]) -> None:
    """Time the program `argv[1:]` and write the result to the file `argv[0]`."""
    file, command = Path(argv[0]), argv[1:]

    def write() -> None:
        timing = {
            "batch_intervals_s": stopwatch.batch_intervals_s,
            "batch_loading_s": stopwatch.batch_loading_s,
            "samples": stopwatch.samples(len(stopwatch.batch_intervals_s)),
        }
        file.write_text(json.dumps(timing), encoding="utf-8")

    def end_process() -> None:
        write()
        os._exit(0)  # no exit handlers: they would clean up after a program that has not finished

    stopwatch = Stopwatch(MAX_BATCHES, LONG_ENOUGH_S, end_process)
    program = load_program(command)
    on_torch_import(stopwatch.install)
    try:
        program()
    finally:
        write()
