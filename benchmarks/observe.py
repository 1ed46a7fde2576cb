"""What it costs to be watched: `python -m benchmarks.observe [--quick] [--json FILE]`.

One process, one loader of tiny items, laps of some seconds: watched as `penstock run` watches (its thread, memory
looks, beacon, kept records and keeper process), and not watched, by turns (A B B A). Ratios are taken pair by pair: of
samples per second, and of samples per second of CPU of this process, all threads, which other programs disturb less.
Beside them stands the CPU time that the watching thread itself took.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from penstock.core.ranks import Ranks
from penstock.launch.outputs import Outputs
from penstock.launch.session import Session
from penstock.observe.watcher import Watcher

TARGET = 0.99
BATCH_SIZE = 128


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter laps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    began = time.perf_counter()
    session = Session(["benchmarks.observe"], Outputs(quiet=True), Ranks())
    session.begin()  # as in `penstock run`: before torch is imported, while there is one thread
    from benchmarks.machine import facts

    pairs, lap_s = (10, 3.0) if asked.quick else (30, 3.0)
    found: dict[str, Any] = {
        "benchmark": "observe",
        "quick": asked.quick,
        "machine": facts(),
        "lap_s": lap_s,
        "batch_size": BATCH_SIZE,
        "rows": [_row(session, workers, pairs, lap_s) for workers in (0, 2)],
        "target": TARGET,
    }
    found["seconds"] = round(time.perf_counter() - began, 1)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    _print(found)


def _row(session: Session, workers: int, pairs: int, lap_s: float) -> dict[str, Any]:
    """Return the laps with so many workers."""
    import torch

    from penstock import DataLoader

    loader = DataLoader(
        torch.arange(1 << 20), batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=workers > 0
    )
    session._watch.notice(loader)
    laps: dict[str, list[tuple[float, float]]] = {"watched": [], "alone": []}
    cpu_shares: list[float] = []
    _lap(loader, lap_s)
    for pair in range(pairs):
        order = ("watched", "alone") if pair % 2 else ("alone", "watched")
        for way in order:
            if way == "alone":
                laps[way].append(_lap(loader, lap_s))
                # Looks may take a share of the time since the start: of the time in which somebody looked, that is.
                session._memory._began += lap_s
                session._next_part_s += lap_s
                continue
            session._watcher = Watcher(session._lookout, session._memory, session._timeline, session._tell)
            session._watcher.start()
            laps[way].append(_lap(loader, lap_s))
            cpu_shares.append(_cpu_s("penstock-watcher") / lap_s)
            session._watcher.stop()
    pairs_of_laps = list(zip(laps["watched"], laps["alone"], strict=True))
    return {
        "workers": workers,
        "samples_per_s": {way: [each[0] for each in found] for way, found in laps.items()},
        "samples_per_cpu_s": {way: [each[1] for each in found] for way, found in laps.items()},
        "ratios": [watched[0] / alone[0] for watched, alone in pairs_of_laps],
        "cpu_ratios": [watched[1] / alone[1] for watched, alone in pairs_of_laps],
        "watcher_cpu_shares": cpu_shares,
    }


def _lap(loader: Any, lap_s: float) -> tuple[float, float]:
    """Return samples per second, and per second of this process's CPU."""
    began, cpu_began = time.perf_counter(), time.process_time()
    samples = 0
    while True:
        for batch in loader:
            samples += len(batch)
            if time.perf_counter() - began >= lap_s:
                return samples / (time.perf_counter() - began), samples / (time.process_time() - cpu_began)


def _cpu_s(name: str) -> float:
    """Return the CPU seconds that a thread of this process has taken (proc(5): schedstat, in nanoseconds)."""
    (thread,) = (each for each in threading.enumerate() if each.name == name)
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def _print(found: dict[str, Any]) -> None:
    verdicts = []
    for row in found["rows"]:
        alone = statistics.median(row["samples_per_s"]["alone"])
        cpu = statistics.median(row["watcher_cpu_shares"])
        words = []
        for name, what in (("ratios", "per second"), ("cpu_ratios", "per second of CPU")):
            low, middle, high = statistics.quantiles(row[name], n=4)
            # How far a median of so many can be trusted: McGill, Tukey, Larsen, "Variations of Box Plots", 1978.
            notch = 1.57 * (high - low) / math.sqrt(len(row[name]))
            is_above, is_below = middle - notch >= found["target"], middle + notch < found["target"]
            word = "reached" if is_above else "not reached" if is_below else "within the noise"
            words.append(f"{middle:.4f} ± {notch:.4f} {what} ({word})")
        print(
            f"{row['workers']} workers: {alone:,.0f} samples/s alone; the watching thread's CPU: {cpu:.3%} of the time"
        )
        verdicts.append(f"{row['workers']} workers {', '.join(words)}")
    print(f"observe: watched, of samples when not watched (target {found['target']}): {'; '.join(verdicts)}")


if __name__ == "__main__":
    main()
