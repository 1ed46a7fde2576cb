"""The tuner against a full grid: `python -m benchmarks.tune [--quick] [--json FILE]`.

For each loop of `benchmarks.tunable` the tuner looks for a setting; then every setting of a grid is measured for two
seconds, with workers of its own, as a person would: no workers, and 1 to cores + 1 processes and threads with
prefetch_factor 1, 2, 4, 8; where samples wait, 8, 16, 32 and 64 with prefetch_factor 2 and 4 too. The grid's three
fastest (of those within the memory, where there is a limit) and the tuner's choice are then measured once more,
interleaved, and compared round by round; the fastest there is the best. Where memory is limited, a thread samples
every 50 ms what all processes take while the tuner runs. Then the best runs beside num_workers="auto", by turns, each
an epoch of its own that is cut off after some seconds, with the start of its workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine_facts import facts
from benchmarks.tunable import Loop, loops
from penstock.core.units import size_text
from penstock.loader.dataloader import DataLoader
from penstock.tune.search import tune
from penstock.tune.search_result import TuneResult
from penstock.tune.setting import Setting, WorkerType
from penstock.tune.trial_bench import TrialBench, process_tree_nbytes
from penstock.tune.trial_result import SettingTrial
from penstock.tune.tuned_loop import TunedLoop

NEAR, ENOUGH, FAST = 0.95, 0.9, 0.1
"""The targets: the chosen setting's speed by the best one's (in most loops, in all), the tuner's time by the grid's."""

EPOCH_S = 8.0
"""How long the epochs are that "auto" is compared in."""

WORKER_TYPES: tuple[WorkerType, ...] = ("process", "thread")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small grid: the times then say nothing")
    parser.add_argument("--loops", nargs="*", help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    console = Console(stderr=True)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # the grid goes to one beyond the cores
    torch.set_num_threads(1)  # a step that takes all cores would be measured, and not the loaders
    began, rows = time.perf_counter(), []
    with ExitStack() as stack:
        for loop in loops(stack):
            if asked.loops and loop.name not in asked.loops:
                continue
            rows.append(_row(loop, quick=asked.quick))
            console.print(_words(rows[-1]), style="dim")
            found = {
                "benchmark": "tune",
                "quick": asked.quick,
                "machine": facts(),
                "load": os.getloadavg()[0],
                "targets": {"of_best": NEAR, "of_best_in_all": ENOUGH, "of_grid_time": FAST},
                "rows": rows,
                "seconds": round(time.perf_counter() - began, 1),
            }
            if asked.json:
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
    _print(rows, time.perf_counter() - began)


def _row(loop: Loop, *, quick: bool) -> dict[str, Any]:
    with _watched() if loop.ram_nbytes else nullcontext([0]) as peak:
        found = tune(loop.tuned_loop, ram_nbytes=loop.ram_nbytes)
    began = time.perf_counter()
    grid = [_alone(loop.tuned_loop, setting, 0.5 if quick else 2.0) for setting in _grid(quick=quick, waits=loop.waits)]
    grid_s = time.perf_counter() - began
    allowed = [trial for trial in grid if loop.ram_nbytes is None or trial.ram_nbytes <= loop.ram_nbytes]
    best = sorted(allowed, key=lambda trial: -trial.samples_per_s)[:3]
    ratios, against = _side_by_side(loop, found, [trial.setting for trial in best], rounds=2 if quick else 7)
    automatic = [_automatic_by(loop, against, is_first=bool(turn % 2)) for turn in range(2 if quick else 5)]
    return {
        "name": loop.name,
        "waits": loop.waits,
        "choice": found.choice.line(),
        "against": against.describe(),
        "of_best": ratios,
        "auto_of_best": [ratio for ratio, _ in automatic],
        "auto": automatic[-1][1],
        "tuner_s": found.seconds,
        "grid_s": grid_s,
        "grid_settings": len(grid),
        "ram_nbytes": loop.ram_nbytes,
        "tuner_peak_nbytes": peak[0],
        "choice_nbytes": found.choice_trial.ram_nbytes,
        "why": found.why,
        "doubt": found.doubt,
        "tuned": found.to_json(),
        "grid": [asdict(trial) for trial in grid],
    }


def _grid(*, quick: bool, waits: bool) -> Iterator[Setting]:
    cores = len(os.sched_getaffinity(0))
    yield Setting()
    for worker_type in WORKER_TYPES:
        few = [(workers, (2,) if quick else (1, 2, 4, 8)) for workers in range(1, cores + 2, 2 if quick else 1)]
        many = [(workers, (2,) if quick else (2, 4)) for workers in (8, 16, 32, 64)[quick:] if waits]
        for workers, prefetch_factors in few + many:
            for prefetch_factor in prefetch_factors:
                yield Setting(workers=workers, worker_type=worker_type, prefetch_factor=prefetch_factor)


def _alone(loop: TunedLoop, setting: Setting, seconds: float) -> SettingTrial:
    with TrialBench(loop, most=max(1, setting.workers)) as bench:
        return bench.measure(setting, at_least_s=seconds, at_most_s=2 * seconds)


def _side_by_side(loop: Loop, found: TuneResult, best: list[Setting], *, rounds: int) -> tuple[list[float], Setting]:
    """Return the choice's speed by the best one's, round by round, and who is the best."""
    if set(best) == {found.choice}:
        return [1.0] * rounds, found.choice
    contestants = list(dict.fromkeys([found.choice, *best]))
    speeds: dict[Setting, list[float]] = {setting: [] for setting in contestants}
    for number in range(rounds):
        for setting in reversed(contestants) if number % 2 else contestants:
            speeds[setting].append(_alone(loop.tuned_loop, setting, 1.0).samples_per_s)
    fastest = max(contestants, key=lambda setting: statistics.median(speeds[setting]))
    pairs = zip(speeds[found.choice], speeds[fastest], strict=True)
    return [own / other for own, other in pairs], fastest


def _automatic_by(loop: Loop, best: Setting, *, is_first: bool) -> tuple[float, str]:
    """Return the speed of num_workers="auto" by the best setting's in an epoch of its own each, and what it chose."""
    contestants: dict[str, dict[str, Any]] = {"auto": {"num_workers": "auto"}, "best": best.arguments()}
    speeds, chosen = {}, ""
    for name in contestants if is_first else reversed(contestants):
        speeds[name], said = _begin_epoch(loop.tuned_loop, contestants[name])
        chosen = said if name == "auto" else chosen
    return speeds["auto"] / speeds["best"], chosen


def _begin_epoch(loop: TunedLoop, arguments: dict[str, Any]) -> tuple[float, str]:
    """Return the batches per second of an epoch's first seconds, and how many workers it had in the end, and why."""
    given, began, batches = loop.loader, time.perf_counter(), 0
    loader = DataLoader(
        given.dataset, batch_size=given.batch_size, sampler=given.sampler, collate_fn=given.collate_fn, **arguments
    )
    for batch in loader:
        loop.run_step(batch)
        batches += 1
        if time.perf_counter() - began > EPOCH_S:
            break
    counted = loader.statistics()
    return batches / (time.perf_counter() - began), f"{counted.workers} workers, {counted.workers_reason}"


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Yield the most memory that was added meanwhile, in a list of one."""
    base, over = process_tree_nbytes(), threading.Event()
    peak = [0]

    def look() -> None:
        while not over.wait(0.05):
            peak[0] = max(peak[0], process_tree_nbytes() - base)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def _words(row: dict[str, Any]) -> str:
    ratio = statistics.median(row["of_best"])
    times = f"{row['tuner_s']:.1f} of {row['grid_s']:.0f} s"
    automatic = f"auto {statistics.median(row['auto_of_best']):.3f} ({row['auto']})"
    return f"{row['name']}: {row['choice']}, {ratio:.3f} of {row['against']}, {times}; {automatic}"


def _print(rows: list[dict[str, Any]], seconds: float) -> None:
    table = Table(title="the tuner's choice, and the best of a full grid")
    heads = (
        "loop",
        "chosen",
        "best of the grid",
        "of its speed (least … most)",
        "auto",
        "tuner / grid, s",
        "memory / budget",
    )
    for head in heads:
        table.add_column(head)
    for row in rows:
        ratios = row["of_best"]
        budget = size_text(row["ram_nbytes"] or 0)
        table.add_row(
            row["name"],
            row["choice"].partition("(..., ")[2].removesuffix(")"),
            row["against"],
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})",
            f"{statistics.median(row['auto_of_best']):.2f}",
            f"{row['tuner_s']:.1f} / {row['grid_s']:.0f} = {row['tuner_s'] / row['grid_s']:.3f}",
            f"{size_text(row['tuner_peak_nbytes'])} / {budget}" if row["ram_nbytes"] else "–",
        )
    Console(width=150).print(table)
    speeds = [statistics.median(row["of_best"]) for row in rows]
    near, enough = sum(speed >= NEAR for speed in speeds), sum(speed >= ENOUGH for speed in speeds)
    quick = sum(row["tuner_s"] <= FAST * row["grid_s"] for row in rows)
    capped = [row for row in rows if row["ram_nbytes"]]
    within = sum(row["tuner_peak_nbytes"] <= row["ram_nbytes"] for row in capped)
    followed = sum(statistics.median(row["auto_of_best"]) >= ENOUGH for row in rows)
    print(
        f"tune: within 5 % of the best in {near} and 10 % in {enough} of {len(rows)}, a tenth of the grid's time or "
        f"less in {quick} of {len(rows)}, within the memory in {within} of {len(capped)}; "
        f"auto: {ENOUGH} of the best in {followed} of {len(rows)}; {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
