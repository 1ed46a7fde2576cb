"""What samples cost: made one by one in this process, every other one under the profiler, then collated."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torch.utils.data.dataloader import _DatasetKind

from penstock.observe.doctor.contents.batch_padding import find_padding
from penstock.observe.doctor.contents.field_types import FieldTypes
from penstock.observe.doctor.probe_results import ImageDecode, SampleCosts
from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.probes.batch_values import all_finite, sent_tensors
from penstock.observe.doctor.probes.constant_seeds import SeedRecorder
from penstock.observe.doctor.probes.dataset_profile import DatasetProfile
from penstock.observe.doctor.probes.held_locks import LockRecorder
from penstock.observe.doctor.probes.image_decode import ImageDecodeRecorder
from penstock.observe.doctor.probes.line_sampler import LineSampler, count_values
from penstock.observe.doctor.probes.repeated_reads import ReadRecorder
from penstock.observe.doctor.probes.sample_calls import StreamEndedError, iter_sample_calls, samples_per_batch
from penstock.observe.doctor.probes.stored.changed_data import find_changed_data
from penstock.observe.doctor.probes.stored.tensor_keys import find_tensor_keys
from penstock.observe.doctor.probes.torch_threads import one_thread
from penstock.observe.doctor.stored_results import ChangedData, TensorKeys
from penstock.observe.doctor.thresholds import THRESHOLDS

_MOST_SAMPLES = 3000
_MOST_CHECKED = 512
_WATCHED = 0.3
"""Of the time, for the samples that are watched."""
_MOST_TURNS = 20
_LOOKS = 60
_MOST_REPEATED = 16
_MOST_MADE_AGAIN = 6
_MADE_AGAIN, _MADE_TIMES = 0.3, 8
"""Of the time of the samples that are watched, for those that show whether they change stored data."""
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
        self._profile = DatasetProfile()
        self._images = ImageDecodeRecorder()
        self._lines = LineSampler(counts_values=True)
        self._reads = ReadRecorder()
        self._seeds = SeedRecorder()
        self._locks = LockRecorder()
        self._other_threads_s = 0.0
        self._not_finite: list[Any] = []
        self._types = FieldTypes()
        self._busy_s: list[tuple[Any, float]] = []
        self._unprofiled_s: list[float] = []
        self._asleep_s = 0.0
        self._wall_s = 0.0
        self._idle_machine_s = 0.0
        self._repeated_s: dict[Any, float] = {}
        self._read: proc.ReadCounters | None = None
        self._draws_s: list[float] = []
        self.samples: list[Any] = []
        """The first ones, up to one batch of them."""
        self._first_calls: list[tuple[Any, Callable[[], Any]]] = []
        self.changed_data: ChangedData | None = None
        self.tensor_keys: TensorKeys | None = None
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
                self._look_at_stored_data()
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
            sample_s=statistics.fmean(self._unprofiled_s or times_s),
            median_s=statistics.median(times_s),
            sampler_s=statistics.fmean(self._draws_s[1:] or [0.0]) * samples_per_batch(self._loader),
            sampler_start_s=self._draws_s[0] if self._draws_s else 0.0,
            sleep_fraction=min(1.0, sleep_fraction),
            numbers_per_sample=_count_numbers(self.samples[0]),
            values_per_sample=sum(map(count_values, torch.utils._pytree.tree_leaves(self.samples[0]))),
            nested=_nesting(self._loader.dataset),
            hotspots=self._profile.hotspots(),
            lines=self._lines.lines(),
            repeated_read=self._reads.result(self._lines),
            constant_seed=self._seeds.result(),
            shared_lock=self._locks.result(),
            not_finite=tuple(self._not_finite),
            type_changes=self._types.changes(),
            other_threads_cores=self._other_threads_s / self._wall_s if self._wall_s else 0.0,
        )
        costs = self._with_fractions(costs, sleep_fraction)
        costs = self._with_slow_samples(costs)
        costs = self._with_collate(costs)
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
            if number < _MOST_MADE_AGAIN:
                self._first_calls.append((index, make))
            is_profiled = number % 2 == 1
            before = proc.thread_times()
            process_s = time.process_time()
            try:
                sample = self._profile_sample(index, make) if is_profiled else make()
            except StreamEndedError:
                break
            process_s = time.process_time() - process_s
            took = proc.thread_times_since(before)
            self._other_threads_s += max(0.0, process_s - took.ran_s)
            self._wall_s += took.wall_s
            self._asleep_s += took.asleep_s
            self._idle_machine_s += took.busy_s
            self._busy_s.append((index, took.busy_s))
            if not is_profiled:
                self._unprofiled_s.append(took.busy_s)
            if len(self.samples) < wanted:
                self.samples.append(sample)
            if number < _MOST_CHECKED:
                self._types.add(_printable_index(index), sample)
                if not all_finite(sample):
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
        """Make more samples, which are not timed: the thread that looks at them takes Python's lock now and then."""
        until = time.perf_counter() + self._watched_s
        # A small dataset has no more samples that are new: then the first ones are made again, until lines are known.
        turns = itertools.chain([0], itertools.takewhile(lambda _: self._lines.looks < _LOOKS, range(_MOST_TURNS)))
        again = itertools.chain.from_iterable(iter_sample_calls(self._loader) for _ in turns)
        with self._lines:
            for index, make in itertools.chain(calls, again):
                try:
                    with self._reads.sample(index), self._locks.sample():
                        self._lines.is_paused = False
                        make()
                        self._lines.is_paused = True
                except StreamEndedError:
                    break
                finally:
                    self._lines.is_paused = True
                if time.perf_counter() > until:
                    break

    def _profile_sample(self, index: Any, make: Callable[[], Any]) -> Any:
        with self._images.recording(), self._reads.sample(index), self._seeds.sample(index):
            return self._profile.call(make)

    def _repeat_slow_samples(self) -> None:
        """Make samples that were slow once more: a pause of the machine does not repeat itself."""
        if self._loader._dataset_kind == _DatasetKind.Iterable or not self._busy_s:
            return
        median_s = statistics.median(seconds for _, seconds in self._busy_s)
        for index in [index for index, seconds in self._busy_s if _is_slow(seconds, median_s)][:_MOST_REPEATED]:
            before = proc.thread_times()
            self._loader.dataset[index]
            self._repeated_s[_printable_index(index)] = proc.thread_times_since(before).busy_s

    def _look_at_stored_data(self) -> None:
        """Look for data that samples change: some are made again, as above, and the data are left as they were."""
        if self._loader._dataset_kind == _DatasetKind.Iterable:
            return
        seconds = self._watched_s * _MADE_AGAIN
        is_slow = statistics.fmean(took for _, took in self._busy_s or [(0, 0.0)]) * _MADE_TIMES > seconds
        with suppress(Exception):  # of the dataset, which has made them before
            self.tensor_keys = find_tensor_keys(self._loader.dataset, iter_sample_calls(self._loader))
            if not is_slow:
                until = time.perf_counter() + seconds
                self.changed_data = find_changed_data(self._loader.dataset, self._first_calls, until)

    def _with_fractions(self, costs: SampleCosts, sleep_fraction: float) -> SampleCosts:
        fractions = self._profile.fractions()
        if fractions is None:
            return costs
        storage, decode, coordination, rest = fractions
        # A read through a memory map is no function call, so the profiler cannot see it; but the thread sleeps in it.
        mapped = min(rest, max(0.0, sleep_fraction - storage - coordination))
        return replace(
            costs,
            storage_fraction=storage + mapped,
            decode_fraction=decode,
            coordination_fraction=coordination,
            transform_fraction=rest - mapped,
        )

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
            return _with_tensors(replace(costs, batch_nbytes=tensor_nbytes(self.samples[0])), self.samples[0])
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
        costs = _with_tensors(costs, batch)
        return replace(
            costs,
            collate_s=statistics.median(taken_s) * scale,
            batch_nbytes=int(nbytes * scale),
            float64_fraction=tensor_nbytes(batch, "float64") / nbytes if nbytes else 0.0,
            padding=find_padding(self.samples, batch),
        )


def _with_tensors(costs: SampleCosts, batch: Any) -> SampleCosts:
    tensors, nbytes = sent_tensors(batch)
    return replace(costs, batch_tensors=tensors, batch_tensors_nbytes=nbytes)


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
    return seconds > THRESHOLDS.slow_sample * median_s


def _nesting(dataset: Any) -> int:
    """Return how many of torch's ConcatDataset and Subset lie inside each other."""
    deepest, left = 0, [(dataset, 0)]
    while left:
        one, depth = left.pop()
        deepest = max(deepest, depth)
        if type(one) is Subset:
            left.append((one.dataset, depth + 1))
        elif type(one) is ConcatDataset:
            left += [(part, depth + 1) for part in one.datasets]
    return deepest


def _count_numbers(sample: Any) -> int:
    return sum(isinstance(leaf, int | float) for leaf in torch.utils._pytree.tree_leaves(sample))


def _printable_index(index: Any) -> Any:
    return index if isinstance(index, int | str) else repr(index)


def _read_since(before: proc.ReadCounters | None) -> proc.ReadCounters | None:
    after = proc.read_counters()
    return after.since(before) if before is not None and after is not None else None
