"""A stream: samples in the order in which shards hold them, shared out over ranks and workers, shuffled, resumable.

    ranks × workers    each a consumer. With as many shards as consumers, a shard has one reader; with fewer, readers of
                       one shard take every n-th record of it. Every sample comes once an epoch, whatever the numbers.
    shuffle            shards by the seed and the epoch; `interleave` of them are read by turns; and blocks of `window`
                       records are permuted. A block is what a resumed stream reads again, and all that it does.
    state              epoch, block, and the place of each open shard at the block's beginning: some dozen numbers

A record that is broken is an error with its file, byte and key, or is left out and counted, as `errors` says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.distributed.place import place
from penstock.feed.sources.sample import Errors, Sample, Schema, schema_of

WINDOW = 1024
"""Records that are shuffled together."""

INTERLEAVE = 4
"""Shards that a shuffled stream reads by turns."""

_STATE = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, or whatever is read from its beginning to its end."""

    name: str
    """Its path."""

    count: int | None = None
    """Its records; None where only reading it tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """In which order a stream is read."""

    shuffle: bool = False
    seed: int | None = None
    """Of the order; None draws one from torch's random state for each epoch."""
    window: int = WINDOW
    interleave: int = INTERLEAVE

    def __post_init__(self) -> None:
        if self.window < 1 or self.interleave < 1:
            raise OptionError(f"window={self.window} and interleave={self.interleave} have to be 1 or more")


class Stream(IterableDataset[Any]):
    """Samples of shards, one after another: a dataset for any DataLoader, torch's or penstock's.

    A format gives `read`. Iterating takes the consumer's share: of this rank (of `torch.distributed`, or of torchrun's
    environment) and of this worker. Without a seed, ranks keep their shards from epoch to epoch.

    Args:
        shards: in their order.
        way: in which order they are read.
        errors: "raise", or "skip": leave out records that are broken, warn, and count them in `skipped`.
    """

    where = "this stream"

    def __init__(self, shards: Sequence[Shard], way: Way | None = None, errors: Errors = "raise") -> None:
        super().__init__()
        if errors not in ("raise", "skip"):
            raise OptionError(f"errors={errors!r} is neither 'raise' nor 'skip'")
        self.shards = tuple(shards)
        self.way = way or Way()
        self.errors = errors
        self.skipped = 0
        self._stages: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
        self._epoch = 0
        self._has_begun = False
        self._is_set = False
        self._ranks: tuple[int, int] | None = None
        self._current: _Pass | None = None
        self._resumes: dict[str, Any] | None = None

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield records `first`, `first + step`, ... of a shard, and a RecordError in the place of one that is broken.

        Skipping must not cost what making a sample costs.

        Raises:
            RecordError: the rest of the shard cannot be read.
        """
        raise NotImplementedError

    # ── on top of it ────────────────────────────────────────────────────────────────────────────────────────

    def map(self, function: Callable[[Any], Any]) -> Stream:
        """Return a stream of `function(sample)` for each sample."""
        return self._with("map", function)

    def filter(self, function: Callable[[Any], bool]) -> Stream:
        """Return a stream of the samples for which `function(sample)` is true."""
        return self._with("filter", function)

    def shuffled(self, *, seed: int | None = None, window: int = WINDOW, interleave: int = INTERLEAVE) -> Stream:
        """Return a stream of the same samples in a random order.

        Args:
            seed: of the order, which then depends on it, the epoch, and how many ranks and workers there are; None
                draws one from torch's random state.
            window: records that are permuted together; a consumer holds as many.
            interleave: shards that are read by turns.
        """
        other = self._again()
        other.way = Way(shuffle=True, seed=seed, window=window, interleave=interleave)
        return other

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it passes count by themselves.

        Persistent workers count on by themselves. Under torch's own loader workers that are not persistent know of no
        epoch but this one: with a seed, say it before each.
        """
        self._epoch = epoch
        self._is_set = True

    @property
    def epoch(self) -> int:
        """The pass that workers are at, or that this process begins next."""
        return self._epoch

    def begin_pass(self) -> None:
        """Count a pass that this process's workers begin: penstock's DataLoader calls it before they do."""
        if self._has_begun and not self._is_set:
            self._epoch += 1
        self._has_begun, self._is_set = True, False

    @property
    def schema(self) -> Schema:
        """The fields of its first sample."""
        plain = self._again()
        plain.way = Way()
        for sample in _Pass(plain, _Plan()):
            return schema_of(sample)
        raise SourceError(f"{self.where} has no samples, and so no fields")

    def __len__(self) -> int:
        """Return the samples of this rank in the next pass, where all shards tell theirs.

        Raises:
            TypeError: one does not, or samples are filtered; torch then takes the length as unknown.
        """
        counts = [shard.count for shard in self.shards]
        if None in counts or any(kind == "filter" for kind, _ in self._stages):
            raise TypeError(f"the length of {self.where} is known only when it has been read")
        rank, ranks = self._rank()
        parts = self._share(_Plan(seed=self.way.seed or 0, epoch=self._epoch, rank=rank, ranks=ranks))
        return sum(len(range(part.first, counts[part.shard] or 0, part.step)) for part in parts)

    def close(self) -> None:
        """Close what this process has opened."""
        if self._current is not None:
            self._current.close()
            self._current = None

    # ── a pass ──────────────────────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[Any]:
        resumes, self._resumes = self._resumes, None
        plan = _Plan(**resumes["plan"]) if resumes is not None else self._plan()
        self._epoch = plan.epoch + 1
        place = _Place.of(resumes["place"]) if resumes is not None else None
        self._current = _Pass(self, plan, place, resumes["splits"] if resumes is not None else ())
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """Return where this process's current pass is (or the next one, when none is under way)."""
        current = self._current
        if current is None:
            return {"version": _STATE, "of": self._name(), "epoch": self._epoch, "pass": None}
        return {
            "version": _STATE,
            "of": self._name(),
            "epoch": self._epoch,
            "pass": {
                "plan": asdict(current.plan),
                "place": asdict(current.place),
                "splits": [[*split] for split in current.splits],
            },
        }

    def traits(self) -> dict[str, Any]:
        """Return what has to be the same where a pass goes on: the shards, and the way in which they are read."""
        return {"shards": self._name(), **asdict(self.way), "stages": "|".join(kind for kind, _ in self._stages)}

    def begin_state(
        self, *, epoch: int, base_seed: int, rank: int, ranks: int, worker: int, workers: int
    ) -> dict[str, Any]:
        """Return the state in which a worker of a rank begins a pass.

        Args:
            epoch: of the pass.
            base_seed: of the loader's workers; a shuffled stream without a seed has its order from it.
            rank: among `ranks`.
            ranks: how many there are.
            worker: among `workers`.
            workers: how many each rank has.
        """
        is_drawn = self.way.shuffle and self.way.seed is None
        seed = base_seed if is_drawn else self.way.seed or 0
        plan = _Plan(seed=seed, epoch=epoch, rank=rank, ranks=ranks, worker=worker, workers=workers)
        begins = {"plan": asdict(plan), "place": asdict(_Place()), "splits": []}
        return {"version": _STATE, "of": self._name(), "epoch": epoch + 1, "pass": begins}

    def split_state(self, state: dict[str, Any], ways: int) -> list[dict[str, Any]]:
        """Return states of so many consumers that share what is left after `state`: each takes every `ways`-th record.

        Each of them reads all of it, and makes only its own.
        """
        under_way = state["pass"]
        return [
            {**state, "pass": {**under_way, "splits": [*under_way["splits"], [turn, ways, 0]]}} for turn in range(ways)
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass go on where `state` was taken.

        Raises:
            SourceError: it is the state of other shards.
        """
        if state.get("version") != _STATE or state.get("of") != self._name():
            raise SourceError(f"this is no state of {self.where}, with {len(self.shards)} shards: {str(state)[:200]}")
        self._epoch = int(state["epoch"])
        self._resumes = state["pass"]

    def _name(self) -> str:
        names = "\n".join(shard.name.rpartition("/")[2] for shard in self.shards)
        return f"{len(self.shards)} shards, {_hash(names):016x}"

    def _plan(self) -> _Plan:
        rank, ranks = self._rank()
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self.way.seed is not None or not self.way.shuffle:
            seed = self.way.seed or 0
        elif info is not None:
            seed = info.seed - info.id  # the same in all workers of a loader
        else:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        return _Plan(seed=seed, epoch=self._epoch, rank=rank, ranks=ranks, worker=worker, workers=workers)

    def _share(self, plan: _Plan) -> list[_Part]:
        """Return what one worker of one rank reads, in its order."""
        way = self.way
        parts = [_Part(shard, 0, 1) for shard in range(len(self.shards))]
        if way.shuffle and way.seed is not None:
            parts = _permuted(parts, plan.rng(0))  # all ranks agree on it, and so may swap shards
        parts = _dealt(_dealt(parts, plan.rank, plan.ranks), plan.worker, plan.workers)
        return _permuted(parts, plan.rng(1, plan.rank, plan.worker)) if way.shuffle else parts

    def _rank(self) -> tuple[int, int]:
        return place() if self._ranks is None or get_worker_info() is None else self._ranks

    def _with(self, kind: str, function: Callable[[Any], Any]) -> Stream:
        other = self._again()
        other._stages = (*self._stages, (kind, function))
        return other

    def _again(self) -> Stream:
        other = copy.copy(self)
        other._current = other._resumes = None
        other._ranks = self._ranks  # copying it has filled them in
        other.skipped = 0
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the pass that is under way, and with this process's rank: a worker has none."""
        return {**self.__dict__, "_current": None, "_ranks": self._rank()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Which pass this is, and whose."""

    seed: int = 0
    epoch: int = 0
    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    def rng(self, *more: int) -> np.random.Generator:
        return np.random.default_rng([self.seed & (2**64 - 1), self.epoch, *more])


@dataclass(frozen=True, slots=True)
class _Part:
    """Every `step`-th record of a shard, from `first` on."""

    shard: int
    first: int
    step: int


@dataclass(slots=True)
class _Place:
    """Where a pass is: the beginning of its block, and how many records of the block have been dealt with."""

    block: int = 0
    at: int = 0
    next_part: int = 0
    open: list[tuple[int, int]] = field(default_factory=list)
    """Parts that are being read by turns, and how many records of each came before this block."""
    turn: int = 0

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Place:
        return cls(**{**state, "open": [(int(part), int(count)) for part, count in state["open"]]})


def _dealt(parts: list[_Part], who: int, among: int) -> list[_Part]:
    """Return one's share of `parts`, dealt out among so many; where there are too few, some share one.

    >>> [_dealt([_Part(0, 0, 1)], who, 2) for who in range(2)]
    [[_Part(shard=0, first=0, step=2)], [_Part(shard=0, first=1, step=2)]]
    """
    if len(parts) >= among or not parts:
        return parts[who::among]
    mine = parts[who % len(parts)]
    sharing = range(who % len(parts), among, len(parts))
    return [_Part(mine.shard, mine.first + sharing.index(who) * mine.step, mine.step * len(sharing))]


def _permuted(parts: list[_Part], rng: np.random.Generator) -> list[_Part]:
    return [parts[number] for number in rng.permutation(len(parts))]


class _Pass:
    """An iterator over one consumer's share of one epoch. It goes on after an error."""

    def __init__(
        self, stream: Stream, plan: _Plan, place: _Place | None = None, splits: Sequence[Sequence[int]] = ()
    ) -> None:
        self.plan = plan
        self.splits = [[*split] for split in splits]
        """This consumer's turn, among how many, and how many records have come: of each that has split it."""
        self.place = place or _Place()
        self._stream = stream
        self._way = stream.way if stream.way.shuffle else replace(stream.way, window=1, interleave=1)
        self._parts = stream._share(plan)
        self._readers: dict[int, Iterator[Sample | RecordError]] = {}
        self._block: list[Sample | RecordError] | None = None
        self._next = self.place

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        while True:
            record = self._next_record()
            if not self._is_mine():
                continue
            if isinstance(record, RecordError):
                if self._stream.errors == "raise":
                    raise record
                self._stream.skipped += 1
                warnings.warn(f"left out: {record}", stacklevel=2)
                continue
            for kind, function in self._stream._stages:
                if kind == "map":
                    record = function(record)
                elif not function(record):
                    break
            else:
                return record

    def _is_mine(self) -> bool:
        for split in self.splits:
            turn, ways, count = split
            split[2] += 1
            if count % ways != turn:
                return False
        return True

    def close(self) -> None:
        """Close the shards that are open."""
        for reader in self._readers.values():
            close = getattr(reader, "close", None)
            if close is not None:
                close()
        self._readers.clear()

    def _next_record(self) -> Sample | RecordError:
        if not self._way.shuffle:
            return self._next_in_order()
        while self._block is None or self.place.at >= len(self._block):
            if self._block is not None:
                self._next.block = self.place.block + 1
                self.place = self._next
            at = self.place.at
            self._block = self._draw()
            if not self._block:
                self.close()
                raise StopIteration
            self.place.at = at
        record = self._block[self.place.at]
        self.place.at += 1
        return record

    def _next_in_order(self) -> Sample | RecordError:
        """Return the next record of a stream that is not shuffled: it has no blocks, and `place` is always exact."""
        place = self.place
        while True:
            if not place.open:
                if place.next_part >= len(self._parts):
                    self.close()
                    raise StopIteration
                place.open = [(place.next_part, 0)]
                place.next_part += 1
            part, count = place.open[0]
            record = self._take(part, count)
            if record is not None:
                place.open = [(part, count + 1)]
                return record
            place.open = []

    def _draw(self) -> list[Sample | RecordError]:
        """Return the next block, and note in `_next` where the one after it begins."""
        way, place = self._way, self.place
        opened, turn, next_part = list(place.open), place.turn, place.next_part
        block: list[Sample | RecordError] = []
        while len(block) < way.window:
            while len(opened) < way.interleave and next_part < len(self._parts):
                opened.append((next_part, 0))
                next_part += 1
            if not opened:
                break
            turn %= len(opened)
            part, count = opened[turn]
            record = self._take(part, count)
            if record is None:
                opened.pop(turn)
                continue
            block.append(record)
            opened[turn] = (part, count + 1)
            turn += 1
        self._next = _Place(next_part=next_part, open=opened, turn=turn)
        if way.shuffle:
            order = self.plan.rng(2, self.plan.rank, self.plan.worker, place.block).permutation(len(block))
            block = [block[number] for number in order]
        return block

    def _take(self, part: int, count: int) -> Sample | RecordError | None:
        """Return the next record of a part, of which there were `count` already; None at its end."""
        try:
            record = next(self._reader(part, count), None)
        except SourceError as error:  # the rest of this shard cannot be read; the others can
            record = self._told(error, part, count)
            self._readers[part] = iter(())
        if record is None:
            self._readers.pop(part, None)
        return record

    def _told(self, error: SourceError, number: int, count: int) -> RecordError:
        if isinstance(error, RecordError):
            return error
        part = self._parts[number]
        name = self._stream.shards[part.shard].name
        return RecordError(name, -1, part.first + count * part.step, f"the shard cannot be read: {error}")

    def _reader(self, number: int, count: int) -> Iterator[Sample | RecordError]:
        reader = self._readers.get(number)
        if reader is None:
            part = self._parts[number]
            shard = self._stream.shards[part.shard]
            reader = self._readers[number] = self._stream.read(shard, part.first + count * part.step, part.step)
        return reader


def _hash(text: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
