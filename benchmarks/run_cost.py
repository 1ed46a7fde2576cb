"""What `penstock run` costs the program that it runs: `python -m benchmarks.run_cost [--rounds N] [--json FILE]`.

A program runs by turns with `python`, `penstock run` and `penstock run --trace`. What is compared is the CPU time of
all of its processes, the supervisor's and exit handlers included. One program is empty; the other imports penstock's
loader itself, so that the loader is the same, and takes many of the smallest batches that there are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine_facts import facts

PROGRAMS = {
    "empty": "",
    "loop": """
import torch
from penstock import DataLoader
for _ in range(20):
    for batch in DataLoader(torch.arange(128 * 1000), batch_size=128):
        batch.sum()
""",
}
WAYS = {
    "python": (),
    "penstock run": ("-m", "penstock", "run"),
    "penstock run --trace": ("-m", "penstock", "run", "--trace", "trace.json"),
}
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds of each program and way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of every round")
    asked = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the supervisor is a child of nobody's
    seconds = {f"{program}, {way}": [] for program in PROGRAMS for way in WAYS}
    for _ in range(asked.rounds):
        for program, text in PROGRAMS.items():
            for way, words in WAYS.items():
                seconds[f"{program}, {way}"].append(cpu_s(text, words))
    for program in PROGRAMS:
        alone = seconds[f"{program}, python"]
        print(f"{program}: {statistics.median(alone):.2f} s of CPU with python")
        for way in list(WAYS)[1:]:
            more = [one - other for one, other in zip(seconds[f"{program}, {way}"], alone, strict=True)]
            print(f"  {way}: {statistics.median(more):+.2f} s ({min(more):+.2f} … {max(more):+.2f})")
    if asked.json is not None:
        report = {"benchmark": "run_cost", "machine": facts(), "load": os.getloadavg()[0], "cpu_s": seconds}
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


def cpu_s(text: str, words: Sequence[str]) -> float:
    """Return the CPU seconds of a program that is run this way, and of all processes that it leaves."""
    with tempfile.TemporaryDirectory(prefix="penstock-run-cost-") as folder:
        Path(folder, "program.py").write_text(text)
        pid = subprocess.Popen(
            [sys.executable, *words, "program.py"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).pid
        spent_s = 0.0
        while True:
            try:
                ended, code, used = os.wait4(-1, 0)
            except ChildProcessError:
                return spent_s
            if ended == pid and code:
                raise RuntimeError(f"the program ended with {code}")
            spent_s += used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
