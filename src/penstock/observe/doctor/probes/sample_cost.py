"""What samples cost: made one by one in this process and timed, then looked at line by line, then collated."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.observe.doctor.probe_results import ImageDecode, SampleCosts
from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.probes.batch_values import all_finite
from penstock.observe.doctor.probes.constant_seeds import SeedRecorder
from penstock.observe.doctor.probes.image_decode import ImageDecodeRecorder
from penstock.observe.doctor.probes.line_sampler import LineSampler
from penstock.observe.doctor.probes.repeated_reads import ReadRecorder
from penstock.observe.doctor.probes.sample_calls import StreamEndedError, iter_sample_calls, samples_per_batch
from penstock.observe.doctor.probes.torch_threads import one_thread

_SLOW_SAMPLE = 5.0
"""Times the median: what random crops or file sizes explain is less."""

_MOST_SAMPLES = 3000
_MOST_CHECKED = 512
_WATCHED = 0.3
"""Of the time, for the samples whose lines are looked at."""
_MOST_TURNS = 20
_LOOKS = 60
_MOST_REPEATED = 16
_MOST_COLLATES = 7
_COLLATE_S = 0.5


class SampleProbe:
    """Makes samples of one loader for a while.

    Args:
        loader: whose dataset, order and collate function.
        seconds: for about how long.
    """

    def __init__(self, loader: DataLoader[Any], seconds: float) -> None:
        self._loader = loader
        self._watched_s = seconds * _WATCHED
        self._until = time.perf_counter() + seconds - self._watched_s
        self._images = ImageDecodeRecorder()
        self._lines = LineSampler()
        self._reads = ReadRecorder()
        self._seeds = SeedRecorder()
        self._not_finite: list[Any] = []
        self._busy_s: list[tuple[Any, float]] = []
        self._asleep_s = self._idle_machine_s = 0.0
        self._repeated_s: dict[Any, float] = {}
        self._read: proc.ReadCounters | None = None
        self._draws_s: list[float] = []
        self.samples: list[Any] = []
        """The first ones, up to one batch of them."""
        self.error = ""

    def run(self) -> None:
        """Make samples until the time is over, or one raises."""
        before = proc.read_counters()
        with one_thread():
            try:
                calls = iter_sample_calls(self._loader)
                self._make_samples(calls)
                self._read = _read_since(before)
                self._watch_samples(calls)
                self._repeat_slow_samples()
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                self._read = self._read or _read_since(before)

    def image_decode(self) -> ImageDecode | None:
        """Return which images were decoded at full size and then shrunk."""
        return self._images.result()

    def costs(self) -> SampleCosts | None:
        """Return what samples and their batch cost; None if no sample was made."""
        if not self._busy_s:
            return None
        times_s = [seconds for _, seconds in self._busy_s]
        # As in the loader's `busy_time`: time in the run queue is neither sleep nor work.
        sleep_fraction = self._asleep_s / self._idle_machine_s if self._idle_machine_s else 0.0
        costs = SampleCosts(
            samples=len(times_s),
            batch_samples=samples_per_batch(self._loader),
            sample_s=statistics.fmean(times_s),
            median_s=statistics.median(times_s),
            sampler_s=statistics.fmean(self._draws_s[1:] or [0.0]) * samples_per_batch(self._loader),
            sampler_start_s=self._draws_s[0] if self._draws_s else 0.0,
            sleep_fraction=min(1.0, sleep_fraction),
            numbers_per_sample=_count_numbers(self.samples[0]),
            lines=self._lines.lines(),
            repeated_read=self._reads.result(self._lines),
            constant_seed=self._seeds.result(),
            not_finite=tuple(self._not_finite),
        )
        costs = self._with_collate(self._with_slow_samples(costs))
        if self._read is None:
            return costs
        return replace(
            costs,
            read_nbytes=self._read.requested_nbytes,
            disk_nbytes=self._read.disk_nbytes,
            major_faults=self._read.major_faults,
        )

    def _make_samples(self, calls: Iterator[tuple[Any, Callable[[], Any]]]) -> None:
        wanted = samples_per_batch(self._loader)
        for number, (index, make) in enumerate(islice(self._time_draws(calls), _MOST_SAMPLES)):
            if time.perf_counter() > self._until and number >= 2:
                break
            before = proc.thread_times()
            try:
                sample = make()
            except StreamEndedError:
                break
            took = proc.thread_times_since(before)
            self._asleep_s += took.asleep_s
            self._idle_machine_s += took.busy_s
            self._busy_s.append((index, took.busy_s))
            if len(self.samples) < wanted:
                self.samples.append(sample)
            if number < _MOST_CHECKED and not all_finite(sample):
                self._not_finite.append(_printable_index(index))

    def _time_draws(self, calls: Iterator[Any]) -> Iterator[Any]:
        """Yield what `calls` yields, and note the processor time that the sampler takes for it."""
        while True:
            began_s = time.thread_time()
            call = next(calls, None)
            self._draws_s.append(time.thread_time() - began_s)
            if call is None:
                return
            yield call

    def _watch_samples(self, calls: Iterator[tuple[Any, Callable[[], Any]]]) -> None:
        """Make more samples, which are not timed: looking at them takes a little of their time."""
        until = time.perf_counter() + self._watched_s
        # A small dataset has no more samples that are new: then the first ones are made again, until lines are known.
        turns = itertools.chain([0], itertools.takewhile(lambda _: self._lines.looks < _LOOKS, range(_MOST_TURNS)))
        again = itertools.chain.from_iterable(iter_sample_calls(self._loader) for _ in turns)
        with self._lines:
            for number, (index, make) in enumerate(itertools.chain(calls, again)):
                try:
                    with self._images.recording(), self._reads.sample(index), self._seeds.sample(index):
                        self._lines.turn, self._lines.is_paused = number, False
                        make()
                        self._lines.is_paused = True
                except StreamEndedError:
                    break
                finally:
                    self._lines.is_paused = True
                if time.perf_counter() > until:
                    break

    def _repeat_slow_samples(self) -> None:
        """Make samples that were slow once more: a pause of the machine does not repeat itself."""
        if self._loader._dataset_kind == _DatasetKind.Iterable or not self._busy_s:
            return
        median_s = statistics.median(seconds for _, seconds in self._busy_s)
        for index in [index for index, seconds in self._busy_s if _is_slow(seconds, median_s)][:_MOST_REPEATED]:
            before = proc.thread_times()
            self._loader.dataset[index]
            self._repeated_s[_printable_index(index)] = proc.thread_times_since(before).busy_s

    def _with_slow_samples(self, costs: SampleCosts) -> SampleCosts:
        confirmed = {index for index, seconds in self._repeated_s.items() if _is_slow(seconds, costs.median_s)}
        if not confirmed:
            return costs
        refuted = set(self._repeated_s) - confirmed
        slow = [(index, seconds) for index, seconds in self._busy_s if _is_slow(seconds, costs.median_s)]
        fraction = sum(seconds for _, seconds in slow) / sum(seconds for _, seconds in self._busy_s)
        return replace(
            costs,
            slow_indices=tuple(_printable_index(index) for index, _ in slow if _printable_index(index) not in refuted),
            # Not all slow samples were repeated: those that were not count as far as the others were confirmed.
            slow_fraction=fraction * len(confirmed) / len(self._repeated_s),
        )

    def _with_collate(self, costs: SampleCosts) -> SampleCosts:
        if self._loader.batch_sampler is None:
            return replace(costs, batch_nbytes=tensor_nbytes(self.samples[0]))
        taken_s: list[float] = []
        batch = None
        until = time.perf_counter() + _COLLATE_S
        try:
            with one_thread() if self._loader.num_workers else nullcontext():
                while len(taken_s) < 2 or (len(taken_s) < _MOST_COLLATES and time.perf_counter() < until):
                    before = proc.thread_times()
                    batch = self._loader.collate_fn(list(self.samples))
                    taken_s.append(proc.thread_times_since(before).busy_s)
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
            return costs
        scale = costs.batch_samples / len(self.samples)
        nbytes = tensor_nbytes(batch)
        return replace(
            costs,
            collate_s=statistics.median(taken_s) * scale,
            batch_nbytes=int(nbytes * scale),
            float64_fraction=tensor_nbytes(batch, "float64") / nbytes if nbytes else 0.0,
        )


def tensor_nbytes(tree: Any, dtype: str = "") -> int:
    """Return the bytes of all dense tensors and arrays in `tree`, or of those of one type only.

    >>> tensor_nbytes({"x": torch.zeros(4), "y": [torch.zeros(2, dtype=torch.int64), "label"]})
    32
    """
    dense = torch.strided  # a sparse tensor has no `nbytes`, and raises where it is asked for them
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if getattr(leaf, "layout", dense) is dense]
    sized = [leaf for leaf in leaves if hasattr(leaf, "nbytes") and hasattr(leaf, "dtype")]
    return sum(int(leaf.nbytes) for leaf in sized if str(leaf.dtype).endswith(dtype))


def _is_slow(seconds: float, median_s: float) -> bool:
    return seconds > _SLOW_SAMPLE * median_s


def _count_numbers(sample: Any) -> int:
    return sum(isinstance(leaf, int | float) for leaf in torch.utils._pytree.tree_leaves(sample))


def _printable_index(index: Any) -> Any:
    return index if isinstance(index, int | str) else repr(index)


def _read_since(before: proc.ReadCounters | None) -> proc.ReadCounters | None:
    after = proc.read_counters()
    return after.since(before) if before is not None and after is not None else None
