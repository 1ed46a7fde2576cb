"""Indices → samples → a batch in an arena. The same code runs in worker processes, threads, Ray actors and inline.

What it does to a dataset is what torch's fetchers do: `__getitem__` for each index, `__getitems__` once per batch where
there is one, `next` for iterable datasets; and the collate function once per batch. It knows at any moment which sample
is being made, which is what the randomness of a sample depends on (`sample_seed`).

One of our own sources fetches the files of a batch side by side; its samples are then made one by one, each with its
own seed and error. A collate function that has a method `collate_into(samples, arena)` is given the arena, and writes
the batch there itself (see `PadCollate`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import default_collate

from penstock.core.random_states import keep_states
from penstock.loader.collate import BatchWriter, arena_needed, collate_samples
from penstock.loader.transport.arena import Arena, ArenaFullError
from penstock.loader.workers.busy_time import BusyTime
from penstock.loader.workers.messages import Result
from penstock.loader.workers.sample_seed import Making, seed_states
from penstock.loader.workers.worker_spec import SKIP, WorkerSpec, is_stateful

_LONGEST_ORIGIN = 200
"""Characters that are shown: the indices of a batch may be many."""


class Tick(Protocol):
    """Told which row of a batch is made."""

    def __call__(self, row: int) -> None:
        """Note the row before its sample is made; may raise to abandon the batch."""
        ...

    def notes(self, first_row: int) -> Iterator[Any] | None:
        """Return an iterator each step of which notes another row, with no line of Python; None if there is none."""
        ...


class SampleFetcher:
    """Fetches samples of one dataset. An iterable dataset must be begun with `restart`."""

    def __init__(self, worker_spec: WorkerSpec) -> None:
        self.epoch_seed: int | None = None
        self._dataset = worker_spec.dataset
        self._errors = worker_spec.errors
        self._seeded = worker_spec.seeded
        self._index: Any = None
        self._serial = 0
        self._unticked: tuple[Sequence[Any] | None, Iterator[Any], int] | None = None
        """Of a batch of which no sample is noted: its indices (None for a stream), an iterator whose length hint is the
        number of samples that have not been begun, and how many there are in all."""
        self._is_collating = False
        self._is_stream = worker_spec.iterable
        self._stream: Iterator[Any] = iter(())
        self._ended = False
        self._state_before_end: Any = None
        """The dataset's state before that of an end was restored, until it has given a sample."""
        self._shard = ""
        self.position = 0
        """How many samples of the stream have been made or have failed, from its beginning."""

    # ── the stream of an iterable dataset ───────────────────────────────────────────────────────────────────

    def restart(self, shard: str, state: Any = None, end: Any = None) -> None:
        """Begin a new epoch of an iterable dataset: a new iterator.

        Args:
            shard: a name for it.
            state: continue where `stream_state` has returned this.
            end: begin after a pass at whose end `end_state` has returned this. A dataset that then has nothing more
                to give starts over, as it would have in the process that had reached the end.
        """
        dataset_state, iterator_state, self.position = state or (None, None, 0)
        self._state_before_end = None
        if dataset_state is not None:
            self._dataset.load_state_dict(dataset_state)
        elif state is None and end is not None:
            self._state_before_end = copy.deepcopy(self._dataset.state_dict())
            self._dataset.load_state_dict(end)
        self._stream = iter(self._dataset)
        if iterator_state is not None:
            self._stream.load_state_dict(iterator_state)  # type: ignore[attr-defined]
        self._ended = False
        self._shard = shard

    def stream_state(self) -> Any:
        """Return where the iterable dataset is, or None if neither it nor its iterator keeps a state.

        The dataset's state comes first, then the iterator's, as torchdata's StatefulDataLoader asks for them. Also None
        at the end: what has ended may report the state in which it begins. Of a map-style dataset, return what it
        says.
        """
        if not self._is_stream:
            return self._dataset.state_dict()
        if self._ended:
            return None
        dataset, stream = self._dataset, self._stream
        dataset_state = dataset.state_dict() if is_stateful(dataset) and stream is not dataset else None
        iterator_state = stream.state_dict() if is_stateful(stream) else None  # type: ignore[attr-defined]
        if dataset_state is None and iterator_state is None:
            return None
        return dataset_state, iterator_state, self.position

    def end_state(self) -> Any:
        """Return the state of the iterable dataset at the end of a pass, or None if it keeps none."""
        with contextlib.suppress(Exception):  # it may have closed what it reports on; the pass has ended well
            return self._dataset.state_dict() if is_stateful(self._dataset) else None
        return None

    @property
    def has_ended(self) -> bool:
        """Whether the iterable dataset is exhausted."""
        return self._ended

    def fetch_next(self, count: int, fetched: Result, tick: Tick | None, *, are_quick: bool = False) -> list[Any]:
        """Return up to `count` samples of the stream; sets `fetched.ended` when it has none at all.

        Quick ones are not told to `tick`.
        """
        samples: list[Any] = []
        if self._ended:
            fetched.ended = True
            return samples
        if (tick is None or are_quick) and self.is_plain:
            samples = self.fetch_next_plain(count)
            fetched.ended = not samples and fetched.samples == 0
            return samples
        while len(samples) < count:
            if tick is not None:
                tick(len(samples))
            self.begin_sample(f"{self._shard}/{self.position}")
            try:
                samples.append(next(self._stream))
            except StopIteration:
                if self._restart_at_end():
                    continue
                self._ended = True
                fetched.ended = not samples and fetched.samples == 0
                break
            except Exception as error:
                self._apply_policy(error, self.position, samples, fetched)
            self._state_before_end = None
            self.position += 1
        return samples

    def fetch_next_plain(self, count: int) -> list[Any]:
        """Return up to `count` samples of a plain stream: `next` is called as torch calls it, without a word between.

        Fewer only at the end.
        """
        # Not islice, which calls iter() on the stream: a dataset that is its own iterator would begin again.
        streams = itertools.repeat(self._stream, count)
        self._serial += 1
        self._unticked = None, streams, count
        try:
            samples = list(map(next, streams))
        except BaseException as error:
            self.position += count - 1 - operator.length_hint(streams)
            if isinstance(error, Exception):
                add_origin(error, f"sample {self.position} of {self._whole()}")
            raise
        finally:
            self._unticked, self._is_collating = None, False
        if not samples and self._restart_at_end():
            return self.fetch_next_plain(count)
        self._state_before_end = None
        self.position += len(samples)
        is_short = len(samples) < count
        self._index = f"{self._shard}/{self.position - (not is_short)}"
        self._ended = is_short
        return samples

    def _restart_at_end(self) -> bool:
        """Start over, as iter() does, if the stream was restored at an end and had nothing left; return whether."""
        if self._state_before_end is None:
            return False
        self._dataset.load_state_dict(self._state_before_end)
        self._state_before_end = None
        self._stream = iter(self._dataset)
        return True

    # ── samples of a map-style dataset ──────────────────────────────────────────────────────────────────────

    @property
    def is_plain(self) -> bool:
        """Whether nothing has to be done for each sample but to fetch it."""
        return self._errors == "raise" and not self._seeded

    def fetch_plain(self, indices: Sequence[Any], notes: Iterator[Any] | None = None) -> list[Any]:
        """Return the samples of `indices` of a plain dataset, as torch fetches them; a step of `notes` for each."""
        dataset = self._dataset
        left = iter(indices)
        self._serial += 1
        self._unticked = indices, left, len(indices)
        try:
            if notes is None:
                samples = [dataset[index] for index in left]
            else:
                samples = [dataset[index] for index, _ in zip(left, notes, strict=False)]
        except Exception as error:
            add_origin(error, f"sample {self.current()[0]!r} of the dataset")
            raise
        self._index, self._unticked, self._is_collating = indices[-1] if indices else None, None, False
        return samples

    def fetch(
        self,
        indices: Sequence[Any],
        fetched: Result,
        tick: Tick | None,
        first_row: int = 0,
        *,
        are_quick: bool = False,
    ) -> list[Any]:
        """Return the samples of `indices`, which are rows `first_row`, `first_row + 1` ... of their batch.

        The batch cannot be abandoned between quick ones.
        """
        if self.is_plain:
            if tick is None:
                return self.fetch_plain(indices)
            if are_quick and (notes := tick.notes(first_row)) is not None:
                return self.fetch_plain(indices, notes)
        dataset = self._dataset
        samples: list[Any] = []
        for row, index in enumerate(indices, first_row):
            if tick is not None:
                tick(row)
            self.begin_sample(index)
            try:
                samples.append(dataset[index])
            except Exception as error:
                self._apply_policy(error, index, samples, fetched)
        return samples

    # ── which sample is being made ──────────────────────────────────────────────────────────────────────────

    def current(self) -> tuple[Any, int, int]:
        """Return the index of the sample that is being made, and two numbers that tell it from all others."""
        if self._unticked is None:
            index = f"collate after {self._index}" if self._is_collating else self._index
            return index, self._serial, 0
        indices, left, count = self._unticked
        row = count - 1 - operator.length_hint(left)
        index = f"{self._shard}/{self.position + row}" if indices is None else indices[row]
        return index, self._serial, row

    def begin_sample(self, index: Any) -> None:
        """Note that the sample of `index` is being made from now on, and seed the random states for it."""
        self._index, self._unticked, self._is_collating = index, None, False
        self._serial += 1
        if self._seeded:
            seed_states()

    def begin_bulk(self, indices: Any) -> None:
        """Note that the dataset is asked for all samples of a batch at once from now on."""
        is_known = isinstance(indices, (list, tuple)) and len(indices) > 0
        self.begin_sample(f"batch of {indices[0]}" if is_known else None)

    def begin_collate(self) -> None:
        """Note that the samples are being collated from now on; that has randomness of its own."""
        self._is_collating, self._unticked = True, None
        self._serial += 1
        if self._seeded:
            seed_states()

    def _apply_policy(self, error: Exception, index: Any, samples: list[Any], fetched: Result) -> None:
        """Apply the error policy to a sample that raised: raise, leave it out, or replace it."""
        policy = self._errors
        if policy == "raise":
            add_origin(error, f"sample {index!r} of {self._whole()}")
            raise error
        replacement = SKIP if policy == "skip" else policy(error, index)
        fetched.skipped = (*fetched.skipped, (index, f"{type(error).__name__}: {error}"))
        if replacement is not SKIP:
            samples.append(replacement)

    def _whole(self) -> str:
        return "its worker's stream" if self._shard else "the dataset"


def add_origin(error: Exception, origin: str) -> None:
    """Add a note to what a dataset has raised, as in "sample 3 of the dataset"; type and message stay as they are."""
    shown = origin if len(origin) <= _LONGEST_ORIGIN else f"{origin[:_LONGEST_ORIGIN]}…"
    error.add_note(f"(penstock: raised for {shown})")


_QUICK_NS = 100_000
"""A sample that takes less is quick: to ask before each of a batch whether to go on would take a good part of that."""

Enlarge = Callable[[int], Arena]
"""Called with the bytes that a batch needs, when its arena is too small; returns one of that size."""


class BatchFetcher:
    """Makes the batches of one task after another, from one dataset."""

    def __init__(self, worker_spec: WorkerSpec, *, in_training_process: bool = False) -> None:
        self.worker_spec = self._worker_spec = worker_spec
        self.samples = self._samples = SampleFetcher(worker_spec)
        self._keeps_states = in_training_process and worker_spec.seeded
        self._busy_time = BusyTime(with_process=not in_training_process)
        self._by_rows = worker_spec.auto_collation and worker_spec.collate_fn is default_collate
        self._fetching = worker_spec.fetching or contextlib.nullcontext
        self._collate_into = getattr(worker_spec.collate_fn, "collate_into", None)

    def pass_over(self, count: int, epoch_seed: int | None) -> None:
        """Make a batch of the iterable dataset and drop it; what fails in it has failed before, too."""
        self._samples.epoch_seed = epoch_seed
        with contextlib.suppress(Exception), self._keep_states(), Making(self._samples):
            self._samples.fetch_next(count, Result(), None)

    def _keep_states(self) -> contextlib.AbstractContextManager[None]:
        return keep_states() if self._keeps_states else contextlib.nullcontext()

    def make(
        self,
        indices: Any,
        arena: Arena | None,
        *,
        result: Result | None = None,
        epoch_seed: int | None = None,
        tick: Tick | None = None,
        enlarge: Enlarge | None = None,
        prefetched: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Result:
        """Make the batch of `indices`, in `arena` where that pays; return `result` with what has become of it.

        When the arena is too small, `enlarge` is asked for a larger one; `Result.arena` is where the batch is.
        `prefetched` is entered while the samples are made.
        """
        self._samples.epoch_seed = epoch_seed
        result = result or Result()
        result.arena = arena
        with self._keep_states(), Making(self._samples):
            self._make(indices, result, tick, enlarge, prefetched)
        return result

    def _make(
        self,
        indices: Any,
        fetched: Result,
        tick: Tick | None,
        enlarge: Enlarge | None,
        prefetched: contextlib.AbstractContextManager[Any] | None,
    ) -> None:
        began = fetched.began_ns = time.perf_counter_ns()
        self._busy_time.begin()
        if not self._worker_spec.auto_collation:
            self._make_unbatched(indices, fetched, tick)
        elif self._worker_spec.iterable:
            self._make_by_samples(indices, fetched, tick, enlarge)
        elif self._worker_spec.makes_whole_batches:
            self._make_bulk(indices, fetched, tick, enlarge)
        elif (
            sequence := indices if isinstance(indices, list) else list(indices)
        ):  # arrays, sets, whatever can be iterated
            with prefetched or self._fetching(sequence):
                self._make_by_samples(sequence, fetched, tick, enlarge)
        else:
            fetched.batch = self._worker_spec.collate_fn([])
        passed_ns = time.perf_counter_ns() - began
        fetched.collate_ns = passed_ns - fetched.fetch_ns
        fetched.busy_ns = self._busy_time.end(passed_ns)

    # ── without automatic batching: one sample, or whatever the dataset makes of the index ──────────────────

    def _make_unbatched(self, index: Any, fetched: Result, tick: Tick | None) -> None:
        if tick is not None:
            tick(0)
        began = time.perf_counter_ns()
        if self._worker_spec.iterable:
            samples = self._samples.fetch_next(1, fetched, tick)
        else:
            samples = self._samples.fetch([index], fetched, None)
        fetched.fetch_ns = time.perf_counter_ns() - began
        if fetched.ended:
            return
        if not samples:
            fetched.empty = True
            return
        fetched.samples = 1
        fetched.batch = self._worker_spec.collate_fn(samples[0])

    # ── a whole batch in one call of the dataset ────────────────────────────────────────────────────────────

    def _make_bulk(self, indices: Any, fetched: Result, tick: Tick | None, enlarge: Enlarge | None) -> None:
        if tick is not None:
            tick(0)
        began = time.perf_counter_ns()
        self._samples.begin_bulk(indices)
        try:
            samples = self._worker_spec.dataset.__getitems__(indices)
        except Exception as error:
            if self._worker_spec.errors == "raise":
                add_origin(error, f"one of the samples {indices!r} of the dataset")
                raise
            samples = self._samples.fetch([*indices], fetched, tick)
        fetched.fetch_ns = time.perf_counter_ns() - began
        self._collate(samples, fetched, 0, enlarge)

    # ── sample by sample ────────────────────────────────────────────────────────────────────────────────────

    def _make_by_samples(
        self,
        indices: Sequence[Any],
        fetched: Result,
        tick: Tick | None,
        enlarge: Enlarge | None,
    ) -> None:
        head = self._timed_fetch(indices[:1], 0, fetched, tick)
        fetched.samples = len(head)
        if fetched.ended:
            return
        writer = self._open_writer(head, len(indices), fetched, enlarge)
        if writer is None:
            rest = self._timed_fetch(indices[1:], 1, fetched, tick, are_quick=fetched.fetch_ns < _QUICK_NS)
            self._finish_list([*head, *rest], len(indices), fetched, enlarge)
            return
        writer.add(head[0])
        for row in range(1, len(indices)):
            sample = self._timed_fetch(indices[row : row + 1], row, fetched, tick)
            if sample:
                writer.add(sample[0])
                fetched.samples += 1
            elif self._samples.has_ended:
                break
        self._finish_rows(writer, len(indices), fetched)

    def _open_writer(
        self,
        head: list[Any],
        count: int,
        fetched: Result,
        enlarge: Enlarge | None,
    ) -> BatchWriter | None:
        """Enlarge the arena for the batch that begins with `head`; return a writer where writing row by row pays."""
        if not (self._by_rows and head and fetched.arena is not None):
            return None
        needed, by_rows = arena_needed(head[0], count)
        if not needed:
            return None
        if needed > fetched.arena.nbytes:
            if enlarge is None:
                return None
            fetched.arena = enlarge(needed)
        return BatchWriter(head[0], count, fetched.arena) if by_rows else None

    def _timed_fetch(
        self, indices: Sequence[Any], row: int, fetched: Result, tick: Tick | None, *, are_quick: bool = False
    ) -> list[Any]:
        began = time.perf_counter_ns()
        if self._worker_spec.iterable:
            samples = self._samples.fetch_next(len(indices), fetched, tick, are_quick=are_quick)
        else:
            samples = self._samples.fetch(indices, fetched, tick, row, are_quick=are_quick)
        fetched.fetch_ns += time.perf_counter_ns() - began
        return samples

    def _finish_rows(self, writer: BatchWriter, wanted: int, fetched: Result) -> None:
        if self._is_dropped(fetched.samples, wanted):
            fetched.ended = True
        else:
            fetched.batch = writer.finish()

    def _finish_list(self, samples: list[Any], wanted: int, fetched: Result, enlarge: Enlarge | None) -> None:
        if self._is_dropped(len(samples), wanted):
            fetched.ended = True
        else:
            self._collate(samples, fetched, wanted, enlarge)

    def _is_dropped(self, got: int, wanted: int) -> bool:
        spec = self._worker_spec
        return spec.iterable and spec.drop_last and self._samples.has_ended and got < wanted

    def _collate(self, samples: Any, fetched: Result, wanted: int, enlarge: Enlarge | None) -> None:
        fetched.samples = len(samples) if hasattr(samples, "__len__") else 0
        if fetched.skipped and not fetched.samples:
            fetched.empty = True
            return
        self._samples.begin_collate()
        if self._by_rows:
            fetched.batch = collate_samples(samples, fetched.arena)
        elif self._collate_into is not None and fetched.arena is not None and enlarge is not None:
            try:
                fetched.batch = self._collate_into(samples, fetched.arena)
            except ArenaFullError as error:
                fetched.arena = enlarge(error.needed)
                fetched.batch = self._collate_into(samples, fetched.arena)
        else:
            fetched.batch = self._worker_spec.collate_fn(samples)
