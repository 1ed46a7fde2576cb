"""Penstock beside torch's DataLoader, in one run: `python -m benchmarks.loader [--quick] [--peers] [--json FILE]`.

Both sides get the same dataset, batch size and two workers. Penstock has its default dispatch, which for these datasets
is torch's assignment of batches to workers. Each comparison runs in a fresh process, in which all of
its loaders are open at once. After one warm-up epoch of each, every round runs one epoch of each loader, in an order
that is reversed from round to round, for five rounds (three with --quick). The ratio is taken within each round, so
that a machine that is busy for a while is busy for both. The table has the median ratio, the lowest and the highest.
The consumer reads one byte of every cache line of every batch in the main process (--consumer copy: it copies the batch
once into a buffer that is reused, as pinning would). `--only tokens` measures the workloads with that word in their
name, and `--add` adds to the rows that FILE has: a long table can be measured in pieces. The
docstring of each file in benchmarks/cases/ describes what the case measures and what its samples are.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.adapters import OURS, WORKERS
from benchmarks.benchmark_result import Result
from benchmarks.cases import CASES
from benchmarks.epoch_timing import Consumer
from benchmarks.interleaved import RunOptions
from benchmarks.machine_facts import facts
from benchmarks.peers import PEERS
from benchmarks.table import summary, terminal_table

WIDTH = 150  # of the table where there is no terminal


def main() -> None:
    """Run the selected cases, print the table, and write the JSON."""
    asked = _arguments()
    if absent := OURS.why_unavailable():
        sys.exit(f"penstock cannot be imported: {absent}; install it (make setup), or set PYTHONPATH=src")
    console, progress = Console(width=None if sys.stdout.isatty() else WIDTH), Console(stderr=True)
    wanted = [] if asked.peers is None else [one for one in PEERS if not asked.peers or one.name in asked.peers]
    absent_peers = {peer.name: reason for peer in wanted if (reason := peer.why_unavailable())}
    peers = tuple(peer for peer in wanted if peer.name not in absent_peers)
    options = RunOptions(quick=asked.quick, consumer=asked.consumer, peers=peers, only=asked.only)

    start = time.perf_counter()
    results: list[Result] = []
    try:
        for name in asked.cases:
            case_start = time.perf_counter()
            results += CASES[name](options)
            progress.print(f"{name}: {time.perf_counter() - case_start:.0f} s", style="dim")
    finally:  # a case that fails does not lose the others' figures
        seconds = time.perf_counter() - start
        if asked.json:
            report = _report(options, results, absent_peers, seconds)
            if asked.add and asked.json.exists():
                report = joined(json.loads(asked.json.read_text()), report)
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            asked.json.write_text(json.dumps(report, indent=1) + "\n")
        _print(console, results, absent_peers, seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__.partition(":")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds of shorter epochs, under three minutes")
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--peers", nargs="*", choices=names, metavar="NAME", help=f"other loaders, all by default: {', '.join(names)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every repeat, ratio and machine fact")
    parser.add_argument("--only", default="", metavar="TEXT", help="the workloads that have this in their name")
    parser.add_argument("--add", action="store_true", help="add to the rows that FILE has")
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME", help=", ".join(CASES)
    )
    parser.add_argument(
        "--consumer", choices=Consumer.MODES[:2], default="touch", help="what the loop does with a batch (%(default)s)"
    )
    return parser.parse_args()


def joined(before: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of two runs in the order of the cases; a row that both have has the rounds of both."""
    rows: dict[tuple[str, str], Result] = {}
    for row in map(Result.from_json, [*before["results"], *report["results"]]):
        known = rows.get((row.name, row.unit), replace(row, figures={}, ratios={}, notes=[]))
        figures, ratios = (
            {name: [*mine.get(name, []), *more.get(name, [])] for name in {**mine, **more}}
            for mine, more in ((known.figures, row.figures), (known.ratios, row.ratios))
        )
        rows[row.name, row.unit] = replace(row, figures=figures, ratios=ratios, notes=[*known.notes, *row.notes])
    cases = list(CASES)
    return {
        **report,
        "command": f"{before['command']}; {report['command']}",
        "seconds": round(before["seconds"] + report["seconds"], 1),
        "results": [row.to_json() for row in sorted(rows.values(), key=lambda row: cases.index(row.case))],
        "absent": {**before["absent"], **report["absent"]},
    }


def _report(options: RunOptions, results: list[Result], absent: dict[str, str], seconds: float) -> dict[str, Any]:
    words = sys.argv[1:]
    if "--json" in words:  # where the file went is nobody's business
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    words = [word for word in words if not word.startswith("--json=")]
    return {
        "benchmark": "loader",
        "command": shlex.join(["python", "-m", "benchmarks.loader", *words]),
        "quick": options.quick,
        "consumer": options.consumer,
        "repeats": options.repeats,
        "workers": WORKERS,
        "dispatch": "auto",
        "machine": facts(),
        "load": [round(load, 1) for load in os.getloadavg()],
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
