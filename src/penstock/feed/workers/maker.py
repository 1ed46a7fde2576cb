"""The maker: indices → samples → a batch in a room. The same code runs in every body.

What it does to a dataset is what torch's fetchers do: `__getitems__` when there is one, else `__getitem__` per index,
`next` for iterable datasets, and the collate function once per batch. A collate function that has a method
`collate_into(samples, room)` is given the room, and writes the batch there itself (see `PadCollate`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils.data import default_collate

from penstock.core.batch import BatchSpec, ColumnSpec
from penstock.feed.collate import BatchWriter, collate_samples, room_needed
from penstock.feed.transport.room import NoRoomError, Room
from penstock.feed.workers.sample_seed import making, seed_states, states_kept

Tick = Callable[[int], None]
"""Called with the row before each sample is made; may raise to abandon the batch."""

Enlarge = Callable[[int], Room]
"""Called with the bytes that a batch needs, when its room is too small; returns one of that size."""


def is_stateful(thing: Any) -> bool:
    """Return whether something keeps a state that can be taken and put back."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class Skip:
    """What an `errors=` callable returns to leave a sample out; the only one is `SKIP`."""

    def __reduce__(self) -> str:
        return "SKIP"

    def __repr__(self) -> str:
        return "penstock.SKIP"


SKIP = Skip()

ErrorPolicy = Literal["raise", "skip"] | Callable[[Exception, Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker needs to make batches; travels to worker processes."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    iterable: bool
    auto_collation: bool
    drop_last: bool
    errors: ErrorPolicy = "raise"
    keep_batch_size: bool = False
    seeded: bool = False
    """Whether each sample is made with random states of its own seed; see `sample_seed`."""

    @property
    def rows_can_be_split(self) -> bool:
        """Whether several workers may fill one batch: samples are made one by one and collated by default_collate."""
        return (
            not self.iterable
            and self.auto_collation
            and self.collate_fn is default_collate
            and self.errors == "raise"
            and not getattr(self.dataset, "__getitems__", None)
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` to `stop` of a batch of `total`."""

    start: int
    stop: int
    total: int


@dataclass(slots=True)
class Made:
    """What became of one piece of work."""

    room: Room | None = None
    batch: Any = None
    part: tuple[BatchSpec, list[list[Any]]] | None = None
    needed: int = 0
    """The bytes of room that would have done, when a part's was too small."""
    samples: int = 0
    ended: bool = False
    """The iterable dataset is exhausted, and this piece got nothing."""
    skipped: list[tuple[Any, str]] = field(default_factory=list)
    state: bytes = b""
    """The state of its lane after it, pickled."""
    began_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0


class NothingLeftError(Exception):
    """Every sample of a batch was skipped; `made` says which."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made = made


class BatchMaker:
    """Makes one piece of work after another, from one dataset."""

    def __init__(self, job: Job, *, in_training_process: bool = False) -> None:
        self.job = self._job = job
        self._keeps_states = in_training_process and job.seeded
        self._getitems = getattr(job.dataset, "__getitems__", None)
        self._by_rows = job.auto_collation and job.collate_fn is default_collate
        self._collate_into = getattr(job.collate_fn, "collate_into", None)
        self.epoch_seed: int | None = None
        self._index: Any = None
        self._serial = 0
        self._under_way: tuple[Sequence[Any], list[Any]] | None = None
        """The indices and the samples of a batch, where nobody notes each: the sample after the last is being made."""
        self._stream: Iterator[Any] = iter(())
        self._ended = False
        self._before_end: Any = None
        """The dataset's state before that of an end was restored, until it has given a sample."""
        self._lane = ""
        self._position = 0

    def restart(self, lane: str, state: Any = None, end: Any = None) -> None:
        """Begin a new epoch of an iterable dataset: a new iterator.

        Args:
            lane: a name for it.
            state: go on where `snapshot` has returned this.
            end: begin after a pass at whose end `end_state` has returned this. A dataset that then has nothing more
                to give is begun anew, as it would have been in the process that had come to the end.
        """
        dataset_state, iterator_state, self._position = state or (None, None, 0)
        self._before_end = None
        if dataset_state is not None:
            self._job.dataset.load_state_dict(dataset_state)
        elif state is None and end is not None:
            self._begin_after(end)
        self._stream = iter(self._job.dataset)
        if iterator_state is not None:
            self._stream.load_state_dict(iterator_state)  # type: ignore[attr-defined]
        self._ended = False
        self._lane = lane

    def snapshot(self) -> Any:
        """Return where the iterable dataset is, if it (or its iterator) can tell; else None.

        First the dataset's state, then the iterator's, as torchdata's StatefulDataLoader asks for them. None, too, at
        the end: what has ended may tell the state in which it begins.
        """
        if self._ended:
            return None
        dataset, stream = self._job.dataset, self._stream
        dataset_state = dataset.state_dict() if is_stateful(dataset) and stream is not dataset else None
        iterator_state = stream.state_dict() if is_stateful(stream) else None  # type: ignore[attr-defined]
        if dataset_state is None and iterator_state is None:
            return None
        return dataset_state, iterator_state, self._position

    def _begin_after(self, end: Any) -> None:
        """Give the dataset the state of an end, where it could be taken back."""
        before = self._job.dataset.state_dict() if is_stateful(self._job.dataset) else None
        if before is not None:
            self._before_end = copy.deepcopy(before)
            self._job.dataset.load_state_dict(end)

    @property
    def has_ended(self) -> bool:
        """Whether the iterable dataset has nothing left."""
        return self._ended

    def end_state(self) -> Any:
        """Return what the iterable dataset says of itself at the end of a pass, if it can tell; else None."""
        with contextlib.suppress(Exception):  # it may have closed what it tells of; the pass has ended well
            return self._job.dataset.state_dict() if is_stateful(self._job.dataset) else None
        return None

    def pass_over(self, count: int, epoch_seed: int | None) -> None:
        """Have the iterable dataset make a batch that nobody needs; what fails in it had failed before, too."""
        self.epoch_seed = epoch_seed
        with contextlib.suppress(Exception), self._kept(), making(self):
            self._fetch_next(count, Made(), None)

    def _kept(self) -> contextlib.AbstractContextManager[None]:
        return states_kept() if self._keeps_states else contextlib.nullcontext()

    def make(
        self,
        indices: Any,
        room: Room | None,
        *,
        epoch_seed: int | None = None,
        tick: Tick | None = None,
        part: Part | None = None,
        enlarge: Enlarge | None = None,
    ) -> Made:
        """Make the batch of `indices`, or the `part` of it that they are, in `room` where that pays.

        When the room is too small, `enlarge` is asked for one of so many bytes; `Made.room` is where the batch is.

        Raises:
            NothingLeftError: every sample was skipped.
        """
        self.epoch_seed = epoch_seed
        with self._kept(), making(self):
            return self._make(indices, room, tick, part, enlarge)

    def _make(
        self, indices: Any, room: Room | None, tick: Tick | None, part: Part | None, enlarge: Enlarge | None
    ) -> Made:
        began = time.perf_counter_ns()
        made = Made(room=room, began_ns=began)
        if not self._job.auto_collation:
            self._make_one(indices, made, tick)
        elif self._getitems is not None and not self._job.iterable:
            self._make_bulk(indices, made, tick, enlarge)
        else:
            self._make_rows(indices, made, tick, part, enlarge)
        made.collate_ns = time.perf_counter_ns() - began - made.fetch_ns
        return made

    # ── without automatic batching: one sample, or whatever the dataset makes of the index ──────────────────

    def _make_one(self, index: Any, made: Made, tick: Tick | None) -> None:
        if tick is not None:
            tick(0)
        began = time.perf_counter_ns()
        samples = self._fetch_next(1, made, tick) if self._job.iterable else self._fetch([index], made, None)
        made.fetch_ns = time.perf_counter_ns() - began
        if made.ended:
            return
        if not samples:
            raise NothingLeftError(made)
        made.samples = 1
        made.batch = self._job.collate_fn(samples[0])

    # ── a whole batch in one call of the dataset ────────────────────────────────────────────────────────────

    def _make_bulk(self, indices: Sequence[Any], made: Made, tick: Tick | None, enlarge: Enlarge | None) -> None:
        if tick is not None:
            tick(0)
        began = time.perf_counter_ns()
        self._begin_sample(f"batch of {indices[0]}" if indices else None)
        try:
            samples = self._job.dataset.__getitems__(indices)
        except Exception:
            if self._job.errors == "raise":
                raise
            samples = self._fetch(indices, made, tick)
        made.fetch_ns = time.perf_counter_ns() - began
        self._collate(samples, made, 0, enlarge)

    # ── sample by sample ────────────────────────────────────────────────────────────────────────────────────

    def _make_rows(
        self,
        indices: Sequence[Any],
        made: Made,
        tick: Tick | None,
        part: Part | None,
        enlarge: Enlarge | None,
    ) -> None:
        head = self._timed_fetch(indices[:1], 0, made, tick)
        made.samples = len(head)
        if made.ended:
            return
        writer = self._begin(head, len(indices), made, part, enlarge)
        if writer is None:
            rest = self._timed_fetch(indices[1:], 1, made, tick)
            self._finish_list([*head, *rest], len(indices), made, part, enlarge)
            return
        writer.add(head[0])
        for row in range(1, len(indices)):
            got = self._timed_fetch(indices[row : row + 1], row, made, tick)
            if got:
                writer.add(got[0])
                made.samples += 1
            elif self._ended:
                break
        self._finish_rows(writer, len(indices), made, part)

    def _begin(
        self,
        head: list[Any],
        count: int,
        made: Made,
        part: Part | None,
        enlarge: Enlarge | None,
    ) -> BatchWriter | None:
        """See to room for the batch that begins with `head`; return a writer for it where writing row by row pays."""
        if not (self._by_rows and head and made.room is not None):
            return None
        total, start = (part.total, part.start) if part else (count, 0)
        needed, by_rows = room_needed(head[0], total)
        if not needed:
            return None
        if needed > made.room.nbytes:
            if part is not None or enlarge is None:
                made.needed = needed
                return None  # a part's samples then travel as they are, and the batch is put together where they arrive
            made.room = enlarge(needed)
        if part is None and not by_rows:
            return None
        return BatchWriter(head[0], total, made.room, start)

    def _timed_fetch(self, indices: Sequence[Any], row: int, made: Made, tick: Tick | None) -> list[Any]:
        began = time.perf_counter_ns()
        if self._job.iterable:
            samples = self._fetch_next(len(indices), made, tick)
        else:
            samples = self._fetch(indices, made, tick, row)
        made.fetch_ns += time.perf_counter_ns() - began
        return samples

    def _finish_rows(self, writer: BatchWriter, wanted: int, made: Made, part: Part | None) -> None:
        if part is not None:
            made.part = writer.finish_part()
        elif self._is_dropped(made.samples, wanted):
            made.ended = True
        else:
            if made.samples < wanted and self._job.keep_batch_size and not self._ended:
                for number in range(wanted - made.samples):
                    writer.add(writer.sample(number))
                made.samples = wanted
            made.batch = writer.finish()

    def _finish_list(
        self, samples: list[Any], wanted: int, made: Made, part: Part | None, enlarge: Enlarge | None
    ) -> None:
        if part is not None:
            made.samples = len(samples)
            made.part = ColumnSpec(0), [samples]
        elif self._is_dropped(len(samples), wanted):
            made.ended = True
        else:
            self._collate(samples, made, wanted, enlarge)

    def _is_dropped(self, got: int, wanted: int) -> bool:
        return self._job.iterable and self._job.drop_last and self._ended and got < wanted

    def _collate(self, samples: list[Any], made: Made, wanted: int, enlarge: Enlarge | None) -> None:
        if not samples:
            raise NothingLeftError(made)
        if len(samples) < wanted and self._job.keep_batch_size and not self._ended:
            samples = list(itertools.islice(itertools.cycle(samples), wanted))
        made.samples = len(samples)
        self._begin_sample(f"collate after {self._index}")
        if self._by_rows:
            made.batch = collate_samples(samples, made.room)
        elif self._collate_into is not None and made.room is not None and enlarge is not None:
            try:
                made.batch = self._collate_into(samples, made.room)
            except NoRoomError as error:
                made.room = enlarge(error.needed)
                made.batch = self._collate_into(samples, made.room)
        else:
            made.batch = self._job.collate_fn(samples)

    # ── samples under the error policy ──────────────────────────────────────────────────────────────────────

    def _fetch(self, indices: Sequence[Any], made: Made, tick: Tick | None, first_row: int = 0) -> list[Any]:
        dataset = self._job.dataset
        samples: list[Any] = []
        if tick is None and self._job.errors == "raise" and not self._job.seeded:
            self._begin_sample(None)
            self._under_way = indices, samples
            for index in indices:
                samples.append(dataset[index])  # noqa: PERF401  `current` counts them
            self._index = indices[-1] if indices else None
            self._under_way = None
            return samples
        for row, index in enumerate(indices, first_row):
            if tick is not None:
                tick(row)
            self._begin_sample(index)
            try:
                samples.append(dataset[index])
            except Exception as error:
                self._judge(error, index, samples, made)
        return samples

    def _fetch_next(self, count: int, made: Made, tick: Tick | None) -> list[Any]:
        """Return up to `count` samples of the stream; sets `ended` when it has none at all."""
        samples: list[Any] = []
        if self._ended:
            made.ended = True
            return samples
        while len(samples) < count:
            if tick is not None:
                tick(len(samples))
            self._begin_sample(f"{self._lane}/{self._position}")
            try:
                samples.append(next(self._stream))
            except StopIteration:
                if self._before_end is not None:  # its end says that nothing is left: this one begins anew by itself
                    self._job.dataset.load_state_dict(self._before_end)
                    self._before_end = None
                    self._stream = iter(self._job.dataset)
                    continue
                self._ended = self._job.auto_collation or self._ended
                made.ended = not samples and made.samples == 0
                break
            except Exception as error:
                self._judge(error, self._position, samples, made)
            self._before_end = None
            self._position += 1
        return samples

    def current(self) -> tuple[Any, int, int]:
        """Return the index of the sample that is being made, and two numbers that tell it from all others."""
        if self._under_way is None:
            return self._index, self._serial, 0
        indices, samples = self._under_way
        return indices[len(samples)], self._serial, len(samples)

    def _begin_sample(self, index: Any) -> None:
        self._index, self._under_way = index, None
        self._serial += 1
        if self._job.seeded:
            seed_states()

    def _judge(self, error: Exception, index: Any, samples: list[Any], made: Made) -> None:
        """Apply the error policy to a sample that raised: raise, leave out, or replace."""
        policy = self._job.errors
        if policy == "raise":
            raise error
        replacement = SKIP if policy == "skip" else policy(error, index)
        made.skipped.append((index, f"{type(error).__name__}: {error}"))
        if replacement is not SKIP:
            samples.append(replacement)
