"""What `penstock run` costs the program that it observes: `python -m benchmarks.observe [--quick] [--json FILE]`.

One process runs one endless loop over one loader of tiny items, cut into laps of 10 ms. Each round has one lap of every
way, in random order: alone; alone again, which shows what the measurement can distinguish; observed as `penstock run`
observes (its thread, memory measurements, status file, saved records and supervisor process); observed with a trace
(`penstock run --trace`); and observed on a clock that runs ten times as fast, whose loss is divided by ten. The
poller's clock stands still in laps that are not observed, so that it does as much per observed second as in a real run;
each way has its own polls. A lap does not end before the poll that began in it.

The result is samples per second, and samples per second of CPU (this process and its workers), over all laps of one
way, as a fraction of the laps alone. No lap is left out: a memory measurement is rare and long, and a median of short
laps would not show it. The confidence bounds are bootstrapped from blocks of 50 rounds (percentiles 2.5 and 97.5 of
4000 draws); the median of the blocks' fractions is printed beside them. How long the trace's own calls take is timed
call by call as well, less what calls take that record nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.events import Recorder
from penstock.core.ranks import Ranks
from penstock.launch.outputs import Outputs
from penstock.launch.session import Session
from penstock.observe.meters.host_memory import descendants

TARGET = 0.99
BATCH_SIZE = 128
LAP_S = 0.01
BLOCK_ROUNDS = 50
POLL_S = 0.5
DRAWS = 4000
KEPT_EVENTS = 100_000


@dataclass(frozen=True)
class Way:
    """One way to run a lap."""

    name: str
    pace: int
    """How fast the poller's clock runs; 0 for a lap that is not observed."""
    traced: bool = False


ALONE, AGAIN = Way("alone", 0), Way("alone again", 0)
OBSERVED, TRACED = Way("observed", 1), Way("observed, with a trace", 1, traced=True)
OFTEN = Way("polled ten times as often, a tenth of the loss", 10)
WAYS = (ALONE, AGAIN, OBSERVED, TRACED, OFTEN)


class TimedRecorder:
    """Times each call of a recorder that is full, or of one that records nothing.

    Args:
        recorder: None for one that records nothing.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.calls_ns: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        record = getattr(self._recorder, name) if self._recorder is not None else lambda *values: None
        calls_ns, clock = self.calls_ns.setdefault(name, []), time.perf_counter_ns

        def timed(*values: Any) -> None:
            began = clock()
            record(*values)
            calls_ns.append(clock() - began)

        setattr(self, name, timed)
        return timed

    def us_per_batch(self, batches: int) -> float:
        """Return the medians of the calls, each as often as a batch has it."""
        return sum(np.median(calls) * len(calls) for calls in self.calls_ns.values()) / batches / 1e3


@dataclass
class LapTiming:
    """The counts of one lap, or of several."""

    laps: int = 0
    samples: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    poller_cpu_s: float = 0.0

    def add(self, other: LapTiming) -> None:
        """Count `other` in."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class PollTrigger:
    """Replaces the event that stops the poller's thread: the thread polls on request, not at intervals."""

    def __init__(self) -> None:
        self.is_resting = False
        self._is_over = False
        self._go = threading.Semaphore(0)

    def poll_once(self) -> None:
        """Make the thread poll once."""
        self.is_resting = False
        self._go.release()

    def wait(self, timeout: float) -> bool:
        """Block until the next poll, and return whether there will be none."""
        self.is_resting = True
        self._go.acquire()
        return self._is_over

    def is_set(self) -> bool:
        """Return whether there will be no more polls."""
        return self._is_over

    def set(self) -> None:
        """Let the thread end."""
        self._is_over = True
        self._go.release()


class _Items:
    """Reads items one by one, as most datasets do; a tensor as the dataset would be gathered a batch at a time."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class Loop:
    """One endless loop over one loader, run lap by lap.

    Args:
        session: the session that observes.
        workers: how many worker processes.
    """

    def __init__(self, session: Session, workers: int) -> None:
        import torch

        from penstock import DataLoader
        from penstock.loader.dataloader import runtime_of

        self._session = session
        assert session._poller_thread is not None
        self._poller_thread = session._poller_thread
        self._trigger = self._poller_thread._stop
        assert isinstance(self._trigger, PollTrigger)
        items = _Items(torch.arange(1 << 20))
        self._loader = DataLoader(items, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=workers > 0)
        session.register(self._loader)
        self._counters = runtime_of(self._loader).counters
        (poller,) = (thread for thread in threading.enumerate() if thread.name == "penstock-poller")
        assert poller.ident is not None
        self._recorder = Recorder(KEPT_EVENTS)
        for stamp in range(KEPT_EVENTS):  # a trace that is full costs most
            self._recorder.add_turn(stamp, stamp, stamp, 0, stamp)
        self._timed, self._empty = TimedRecorder(self._recorder), TimedRecorder(None)
        self._timed_batches = 0
        self._batches = self._without_end()
        next(self._batches)
        self._poller_clock = time.pthread_getcpuclockid(poller.ident)
        self._clocks = [_cpu_clock(pid) for pid in (os.getpid(), *descendants(os.getpid()))]
        self._to_next_poll_s = dict.fromkeys(WAYS, POLL_S)

    def lap(self, way: Way) -> LapTiming:
        """Run one lap."""
        trigger, batches, samples = self._trigger, self._batches, 0
        self._counters.recorder = self._recorder if way.traced else None
        if way.pace and self._to_next_poll_s[way] <= way.pace * LAP_S:
            self._to_next_poll_s[way] += POLL_S
            trigger.poll_once()
        cpu_s, poller_s, began = self._cpu_s(), time.clock_gettime(self._poller_clock), time.perf_counter()
        now, end = began, began + LAP_S
        while now < end or not trigger.is_resting:
            samples += len(next(batches))
            now = time.perf_counter()
        lap = LapTiming(
            laps=1,
            samples=samples,
            seconds=now - began,
            cpu_s=self._cpu_s() - cpu_s,
            poller_cpu_s=time.clock_gettime(self._poller_clock) - poller_s,
        )
        self._to_next_poll_s[way] -= way.pace * lap.seconds
        self._set_back((1 - way.pace) * lap.seconds)
        return lap

    def time_trace(self, batches: int = 100) -> None:
        """Time what a trace's calls take, in so many batches each of a loop that is traced and one that is not."""
        for recorder in (self._timed, self._empty):
            self._counters.recorder = recorder  # type: ignore[assignment]
            for _ in range(batches):
                next(self._batches)
        self._timed_batches += batches

    def trace_calls_us(self) -> float:
        """Return what the calls of a trace take for a batch, in microseconds."""
        return self._timed.us_per_batch(self._timed_batches) - self._empty.us_per_batch(self._timed_batches)

    def _set_back(self, seconds: float) -> None:
        """Set back the clock by which the poller finds what is due, while it rests."""
        self._poller_thread._poller._began += seconds
        self._session._memory._began += seconds
        self._session._memory._due += seconds

    def _cpu_s(self) -> float:
        return sum(map(time.clock_gettime, self._clocks))

    def _without_end(self) -> Any:
        while True:
            yield from self._loader


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer laps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    began = time.perf_counter()
    session = Session(["benchmarks.observe"], Outputs(quiet=True), Ranks())
    session.begin()  # as in `penstock run`: before torch is imported, while there is one thread
    assert session._poller_thread is not None
    session._poller_thread._stop = PollTrigger()  # type: ignore[assignment]
    from benchmarks.machine_facts import facts

    seconds = {0: 18.0, 2: 27.0} if asked.quick else {0: 220.0, 2: 320.0}
    found: dict[str, Any] = {
        "benchmark": "observe",
        "quick": asked.quick,
        "machine": facts(),
        "lap_s": LAP_S,
        "block_rounds": BLOCK_ROUNDS,
        "batch_size": BATCH_SIZE,
        "rows": [_row(session, workers, most_s) for workers, most_s in seconds.items()],
        "target": TARGET,
    }
    found["seconds"] = round(time.perf_counter() - began, 1)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    _print(found)


def _row(session: Session, workers: int, most_s: float) -> dict[str, Any]:
    """Return the figures with `workers` workers, and the blocks that they follow from."""
    loop, order = Loop(session, workers), random.Random(workers)
    ways = list(WAYS)
    for way in 20 * ways:
        loop.lap(way)
    blocks: list[dict[Way, LapTiming]] = []
    end = time.perf_counter() + most_s
    while time.perf_counter() < end:
        block = {way: LapTiming() for way in WAYS}
        for _ in range(BLOCK_ROUNDS):
            order.shuffle(ways)
            for way in ways:
                block[way].add(loop.lap(way))
        loop.time_trace()
        blocks.append(block)
    seconds = {way: sum(block[way].seconds for block in blocks) for way in WAYS}
    observed_s = sum(way.pace * seconds[way] for way in WAYS)
    return {
        "workers": workers,
        "rounds": BLOCK_ROUNDS * len(blocks),
        "samples_per_s_alone": sum(block[ALONE].samples for block in blocks) / seconds[ALONE],
        "trace_cpu_us_per_batch": 1e6 * (_cpu_s_per_batch(blocks, TRACED) - _cpu_s_per_batch(blocks, OBSERVED)),
        "trace_calls_us_per_batch": loop.trace_calls_us(),
        "poller_cpu_share": sum(block[way].poller_cpu_s for block in blocks for way in WAYS) / observed_s,
        "ways": {
            way.name: {
                "of_samples_per_s": share_of_alone(blocks, way, "seconds"),
                "of_samples_per_cpu_s": share_of_alone(blocks, way, "cpu_s"),
            }
            for way in WAYS[1:]
        },
        "blocks": {
            way.name: {field.name: [getattr(block[way], field.name) for block in blocks] for field in fields(LapTiming)}
            for way in WAYS
        },
    }


def _cpu_s_per_batch(blocks: list[dict[Way, LapTiming]], way: Way) -> float:
    return BATCH_SIZE * sum(block[way].cpu_s for block in blocks) / sum(block[way].samples for block in blocks)


def share_of_alone(blocks: list[dict[Way, LapTiming]], way: Way, per: str) -> dict[str, float]:
    """Return samples per `per` of one way as a share of the laps alone, and the bounds of 95 %."""
    counted = np.array(
        [[(block[one].samples, getattr(block[one], per)) for one in (ALONE, way)] for block in blocks], dtype=float
    )
    drawn = np.random.default_rng(0).integers(0, len(blocks), (DRAWS, len(blocks)))

    def share(counts: Any) -> Any:
        rates = counts[..., 0] / counts[..., 1]
        return 1 - (1 - rates[..., 1] / rates[..., 0]) / max(1, way.pace)

    of_blocks = share(counted)
    low, high = np.quantile(share(counted[drawn].sum(1)), (0.025, 0.975))
    median_low, median_high = np.quantile(np.median(of_blocks[drawn], axis=1), (0.025, 0.975))
    found = {"share": share(counted.sum(0)), "low": low, "high": high}
    medians = {"median": np.median(of_blocks), "median_low": median_low, "median_high": median_high}
    return {name: round(float(value), 5) for name, value in {**found, **medians}.items()}


def _cpu_clock(pid: int) -> int:
    """Return the clock of the CPU time of a process, all its threads (clock_getcpuclockid(3))."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, f"process {pid} has no CPU clock: {os.strerror(error)}")
    return clock.value


def _print(found: dict[str, Any]) -> None:
    verdicts = []
    for row in found["rows"]:
        print(
            f"{row['workers']} workers: {row['samples_per_s_alone']:,.0f} samples/s alone; {row['rounds']} rounds; "
            f"the poller thread's CPU: {row['poller_cpu_share']:.3%} of a core; "
            f"a trace: {row['trace_calls_us_per_batch']:.2f} µs for its calls for each batch, "
            f"{row['trace_cpu_us_per_batch']:.2f} µs of CPU more in its laps"
        )
        for name, way in row["ways"].items():
            for of, what in (("of_samples_per_s", "per second"), ("of_samples_per_cpu_s", "per second of CPU")):
                one = way[of]
                words = _bounds(one) if name == AGAIN.name else _words(one, found["target"])
                print(
                    f"  {name}: {words} {what}; "
                    f"median of blocks {one['median']:.4f} ({one['median_low']:.4f} to {one['median_high']:.4f})"
                )
        shares = {way: row["ways"][way.name]["of_samples_per_s"] for way in (OFTEN, OBSERVED, AGAIN)}
        verdicts.append(
            f"{row['workers']} workers {_words(shares[OFTEN], found['target'])} polled ten times as often, "
            f"{_bounds(shares[OBSERVED])} at its own pace; alone against alone {_bounds(shares[AGAIN])}"
        )
    print(
        f"observe: samples per second when observed, as a fraction of those alone (target {found['target']}): "
        f"{'; '.join(verdicts)}"
    )


def _words(one: dict[str, float], target: float) -> str:
    word = "reached" if one["low"] >= target else "not reached" if one["high"] < target else "within the noise"
    return f"{_bounds(one)}, {word}"


def _bounds(one: dict[str, float]) -> str:
    return f"{one['share']:.4f} ({one['low']:.4f} to {one['high']:.4f})"


if __name__ == "__main__":
    main()
