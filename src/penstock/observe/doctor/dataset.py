"""What samples cost: made one by one in this process, every other one under the profiler, then collated."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.observe.doctor import proc
from penstock.observe.doctor.imaging import ShrinkWitness
from penstock.observe.doctor.profiled import Parts
from penstock.observe.examination import SampleCosts, Shrinking

_MOST = 3000
_SLOW = 5.0
_AGAIN = 16


class _EndedError(Exception):
    """A stream of samples has ended."""


class Inspection:
    """Makes samples of one loader for a while.

    Args:
        loader: whose dataset, order and collate function.
        seconds: for about how long.
    """

    def __init__(self, loader: DataLoader[Any], seconds: float) -> None:
        self._loader = loader
        self._until = time.perf_counter() + seconds
        self._parts = Parts()
        self._witness = ShrinkWitness()
        self._times: list[tuple[Any, float]] = []
        self._plain_s: list[float] = []
        self._asleep_s = 0.0
        self._watched_s = 0.0
        self._again: dict[Any, float] = {}
        self._read: proc.Reading | None = None
        self.samples: list[Any] = []
        self.error = ""

    def run(self) -> None:
        """Make samples until the time is over, or one raises."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker
        before = proc.reading()
        try:
            self._make()
            self._read = _since(before, proc.reading())
            self._ask_again()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self._read = self._read or _since(before, proc.reading())
        finally:
            torch.set_num_threads(threads)

    def _make(self) -> None:
        wanted = batch_samples(self._loader)
        for number, (index, make) in enumerate(itertools.islice(calls(self._loader), _MOST)):
            if time.perf_counter() > self._until and number >= 2:
                break
            profiled = number % 2 == 1
            before = proc.moment()
            try:
                sample = self._profiled(make) if profiled else make()
            except _EndedError:
                break
            after = proc.moment()
            took_s = after.wall_s - before.wall_s
            self._watched_s += took_s
            self._asleep_s += max(0.0, took_s - (after.ran_s - before.ran_s) - (after.queued_s - before.queued_s))
            busy_s = max(0.0, took_s - (after.queued_s - before.queued_s))
            self._times.append((index, busy_s))
            if not profiled:
                self._plain_s.append(busy_s)
            if len(self.samples) < wanted:
                self.samples.append(sample)

    def _profiled(self, make: Callable[[], Any]) -> Any:
        with self._witness.watching():
            return self._parts.call(make)

    def _ask_again(self) -> None:
        """Ask once more for samples that were slow: what is slow twice is slow."""
        if self._loader._dataset_kind == _DatasetKind.Iterable or not self._times:
            return
        median_s = statistics.median(seconds for _, seconds in self._times)
        slow = [index for index, seconds in self._times if seconds > _SLOW * median_s]
        for index in slow[:_AGAIN]:
            before = proc.moment()
            self._loader.dataset[index]
            after = proc.moment()
            self._again[_plain(index)] = after.wall_s - before.wall_s - (after.queued_s - before.queued_s)

    # ── what came of it ─────────────────────────────────────────────────────────────────────────────────────

    def shrinking(self) -> Shrinking | None:
        """Return what images were decoded whole and shrunk."""
        return self._witness.found()

    def costs(self) -> SampleCosts | None:
        """Return what samples and their batch cost; None when there was not one sample."""
        if not self._times:
            return None
        times = [seconds for _, seconds in self._times]
        plain = self._plain_s or times
        asleep = self._asleep_s / self._watched_s if self._watched_s else 0.0
        costs = SampleCosts(
            samples=len(times),
            batch_samples=batch_samples(self._loader),
            sample_s=statistics.fmean(plain),
            median_s=statistics.median(times),
            asleep_share=min(1.0, asleep),
            numbers_per_sample=_numbers(self.samples[0]),
            hotspots=self._parts.hotspots(),
        )
        costs = self._with_shares(costs, asleep)
        costs = self._with_slow(costs, times)
        costs = self._with_collate(costs)
        if self._read is None:
            return costs
        return replace(
            costs,
            read_nbytes=self._read.asked_nbytes,
            missed_nbytes=self._read.missed_nbytes,
            major_faults=self._read.major_faults,
        )

    def _with_shares(self, costs: SampleCosts, asleep: float) -> SampleCosts:
        shares = self._parts.shares()
        if shares is None:
            return costs
        storage, decode, rest = shares
        # Reading through a memory map has no name; the thread sleeps in it all the same.
        hidden = min(rest, max(0.0, asleep - storage))
        return replace(costs, storage_share=storage + hidden, decode_share=decode, transform_share=rest - hidden)

    def _with_slow(self, costs: SampleCosts, times: list[float]) -> SampleCosts:
        confirmed = {index for index, seconds in self._again.items() if seconds > _SLOW * costs.median_s}
        if not confirmed:
            return costs
        tried = len(self._again)
        slow = [(index, seconds) for index, seconds in self._times if seconds > _SLOW * costs.median_s]
        refuted = set(self._again) - confirmed
        shown = tuple(_plain(index) for index, _ in slow if _plain(index) not in refuted)
        share = sum(seconds for _, seconds in slow) / sum(times) * len(confirmed) / tried
        return replace(costs, slow_indices=shown, slow_share=share)

    def _with_collate(self, costs: SampleCosts) -> SampleCosts:
        collate = self._loader.collate_fn
        if not self._loader._auto_collation:
            return replace(costs, batch_nbytes=nbytes(self.samples[0]))
        taken: list[float] = []
        batch = None
        until = time.perf_counter() + 0.5
        try:
            while len(taken) < 2 or (len(taken) < 7 and time.perf_counter() < until):
                before = proc.moment()
                batch = collate(list(self.samples))
                after = proc.moment()
                taken.append(after.wall_s - before.wall_s - (after.queued_s - before.queued_s))
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
            return costs
        scale = costs.batch_samples / len(self.samples)
        size = nbytes(batch)
        return replace(
            costs,
            collate_s=statistics.median(taken) * scale,
            batch_nbytes=int(size * scale),
            double_share=nbytes(batch, "float64") / size if size else 0.0,
        )


def batch_samples(loader: DataLoader[Any]) -> int:
    """Return how many samples make a batch; 1 where the dataset makes batches itself."""
    if not loader._auto_collation:
        return 1
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int):
        return size
    try:
        return len(next(iter(loader._index_sampler)))
    except (TypeError, StopIteration):
        return 1


def calls(loader: DataLoader[Any]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Yield what makes the loader's samples, one after another in its own order, with their indices."""
    dataset: Any = loader.dataset
    if loader._dataset_kind == _DatasetKind.Iterable:
        stream = iter(dataset)
        for position in itertools.count():
            yield position, lambda: _next(stream)
    bulk = getattr(dataset, "__getitems__", None)
    for indices in loader._index_sampler:
        for index in indices if loader._auto_collation else [indices]:
            if bulk is not None and loader._auto_collation:
                yield index, lambda index=index: bulk([index])[0]  # type: ignore[misc]
            else:
                yield index, lambda index=index: dataset[index]  # type: ignore[misc]


def _next(stream: Iterator[Any]) -> Any:
    for sample in stream:
        return sample
    raise _EndedError


def nbytes(tree: Any, dtype: str = "") -> int:
    """Return the bytes of all tensors and arrays in `tree`; of one type only, where it is named.

    >>> nbytes({"x": torch.zeros(4), "y": [torch.zeros(2, dtype=torch.int64), "label"]})
    32
    """
    leaves = torch.utils._pytree.tree_leaves(tree)
    sized = [leaf for leaf in leaves if hasattr(leaf, "nbytes") and hasattr(leaf, "dtype")]
    return sum(int(leaf.nbytes) for leaf in sized if str(leaf.dtype).endswith(dtype))


def _numbers(sample: Any) -> int:
    return sum(isinstance(leaf, int | float) for leaf in torch.utils._pytree.tree_leaves(sample))


def _plain(index: Any) -> Any:
    return index if isinstance(index, int | str) else repr(index)


def _since(before: proc.Reading | None, after: proc.Reading | None) -> proc.Reading | None:
    if before is None or after is None:
        return None
    return proc.Reading(
        asked_nbytes=after.asked_nbytes - before.asked_nbytes,
        missed_nbytes=after.missed_nbytes - before.missed_nbytes,
        major_faults=after.major_faults - before.major_faults,
    )
