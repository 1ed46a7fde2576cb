"""Penstock beside torch's DataLoader, in one run: `python -m benchmarks.feed [--quick] [--peers] [--json FILE]`.

Both sides get the same dataset, the same batch size and the same two workers. All contestants of a comparison are open
at once, each is warmed up by one epoch, and then they take turns, in a process that
is fresh for every comparison: one epoch of each per round, in an order that is
reversed from round to round, five rounds (three with --quick). The ratio is taken within each round, so that a machine
that is busy for a while is busy for both; what is printed is the median ratio, with the least and the largest. The
consumer reads one byte of every cache line of every batch in the main process (--consumer copy: it copies the batch
once into a buffer that is reused, as pinning would). What a row measures, and what its samples are, its file in
benchmarks/rows/ says at the top.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.contestants import OURS, WORKERS
from benchmarks.figures import Result
from benchmarks.laps import Consumer
from benchmarks.machine import facts
from benchmarks.peers import PEERS
from benchmarks.race import Plan
from benchmarks.rows import ROWS
from benchmarks.table import summary, terminal_table

WIDTH = 150  # of the table where there is no terminal


def main() -> None:
    """Run the rows that are asked for, print the table, and write the JSON."""
    asked = _arguments()
    if absent := OURS.missing():
        sys.exit(f"penstock cannot be imported: {absent}; install it (make setup), or set PYTHONPATH=src")
    console, progress = Console(width=None if sys.stdout.isatty() else WIDTH), Console(stderr=True)
    absent_peers = {peer.name: reason for peer in PEERS if (reason := peer.missing())} if asked.peers else {}
    peers = tuple(peer for peer in PEERS if peer.name not in absent_peers) if asked.peers else ()
    plan = Plan(quick=asked.quick, way=asked.consumer, peers=peers)

    start = time.perf_counter()
    results: list[Result] = []
    try:
        for name in asked.rows:
            row_start = time.perf_counter()
            results += ROWS[name](plan)
            progress.print(f"{name}: {time.perf_counter() - row_start:.0f} s", style="dim")
    finally:  # a row that fails does not take the others' figures with it
        seconds = time.perf_counter() - start
        if asked.json:
            report = _report(plan, results, absent_peers, seconds)
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            asked.json.write_text(json.dumps(report, indent=1) + "\n")
        _print(console, results, absent_peers, seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feed", description=__doc__.partition(":")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds of shorter epochs, under three minutes")
    parser.add_argument("--peers", action="store_true", help="also measure the other loaders that are installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every repeat, ratio and machine fact")
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME", help=", ".join(ROWS)
    )
    parser.add_argument(
        "--consumer", choices=Consumer.WAYS[:2], default="touch", help="what the loop does with a batch (%(default)s)"
    )
    return parser.parse_args()


def _report(plan: Plan, results: list[Result], absent: dict[str, str], seconds: float) -> dict[str, Any]:
    words = sys.argv[1:]
    if "--json" in words:  # where the file went is nobody's business
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    words = [word for word in words if not word.startswith("--json=")]
    return {
        "benchmark": "feed",
        "command": shlex.join(["python", "-m", "benchmarks.feed", *words]),
        "quick": plan.quick,
        "consumer": plan.way,
        "repeats": plan.repeats,
        "workers": WORKERS,
        "machine": facts(),
        "seconds": round(seconds, 1),
        "results": [result.to_json() for result in results],
        "absent": absent,
    }


def _print(console: Console, results: list[Result], absent: dict[str, str], seconds: float) -> None:
    console.print(terminal_table(results))
    for result in results:
        for note in result.notes:
            console.print(f"{result.name}: {note}", style="dim")
    for name, reason in absent.items():
        console.print(f"{name}: {reason}", style="dim")
    console.print(summary(results, seconds), soft_wrap=True)


if __name__ == "__main__":
    main()
