"""Stream: samples in the order in which shards hold them, divided among ranks and workers, shuffled, resumable.

    ranks × workers    each a consumer with its own share, see `stream_order`
    shuffle            shards by the seed and the epoch; `interleave` of them are read round-robin, and each block of
                       `shuffle_block` records is permuted, see `stream_pass`
    state              epoch, block, and the position of each open shard at the block's beginning: some dozen numbers

A record that is broken is an error with its file, byte and key, or is left out and counted, as `errors` demands.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, NoReturn

import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.core.units import to_epoch
from penstock.data.schema import Errors, Sample, Schema, schema_of
from penstock.data.stream_order import INTERLEAVE, SHUFFLE_BLOCK, PassSpec, ReadOrder, Shard, assign_ranges
from penstock.data.stream_pass import Position, RecordPass
from penstock.distributed.other_sharder import is_shared_out_by_another
from penstock.distributed.rank import rank_and_world_size

__all__ = ["ReadOrder", "Shard", "Stream"]

_STATE_VERSION = 1

Stage = tuple[Literal["map", "filter"], Callable[[Any], Any]]


class Stream(IterableDataset[Any]):
    """Samples of shards, one after another: a dataset for any DataLoader, torch's or penstock's.

    A format implements `read`. Iterating yields the consumer's share: that of this rank (of `torch.distributed`, or of
    torchrun's environment) and of this worker. Without a seed, ranks keep their shards from epoch to epoch. Where
    Accelerate's `prepare` or Hugging Face's Trainer shares samples out over ranks, a rank's share is all of them.

    Args:
        shards: in their order.
        order: in which they are read; None reads them in order.
        errors: "raise", or "skip": leave out records that are broken, warn, and count them in `skipped`.

    Raises:
        OptionError: `errors` is neither.
    """

    where = "this stream"

    def __init__(self, shards: Sequence[Shard], order: ReadOrder | None = None, errors: Errors = "raise") -> None:
        super().__init__()
        if errors not in ("raise", "skip"):
            raise OptionError(f"errors={errors!r} is neither 'raise' nor 'skip'")
        self.shards = tuple(shards)
        self.order = order or ReadOrder()
        self.errors = errors
        self.skipped = 0
        self._stages: tuple[Stage, ...] = ()
        self.epoch = 0
        """The epoch that workers are reading, or that this process begins next."""
        self.is_epoch_set = False
        """Whether `set_epoch` was called since the last pass began."""
        self._ranks: tuple[int, int] | None = None
        """Of the process that has pickled it, for workers."""
        self._group: tuple[int, int] | None = None
        self._current: _SamplePass | None = None
        self._resume_from: dict[str, Any] | None = None

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield records `first`, `first + step`, ... of a shard, and a RecordError in the place of one that is broken.

        Skipping a record must cost less than making a sample of it.

        Raises:
            RecordError: the rest of the shard cannot be read.
        """
        raise NotImplementedError

    # ── streams made of this one ────────────────────────────────────────────────────────────────────────────

    def map(self, function: Callable[[Any], Any]) -> Stream:
        """Return a stream of `function(sample)` for each sample."""
        return self._with_stage("map", function)

    def filter(self, function: Callable[[Any], bool]) -> Stream:
        """Return a stream of the samples for which `function(sample)` is true."""
        return self._with_stage("filter", function)

    def shuffle(
        self, *, seed: int | None = None, shuffle_block: int = SHUFFLE_BLOCK, interleave: int = INTERLEAVE
    ) -> Stream:
        """Return a stream of the same samples in a random order.

        Args:
            seed: of the order, which then depends on it, the epoch, and the numbers of ranks and workers; None draws
                one from torch's random state.
            shuffle_block: records that are permuted together; each consumer holds this many in memory.
            interleave: shards that are read round-robin.

        Raises:
            OptionError: `shuffle_block` or `interleave` is not positive.
        """
        other = self._copy()
        other.order = ReadOrder(shuffle=True, seed=seed, shuffle_block=shuffle_block, interleave=interleave)
        return other

    def cached(self, *arguments: object, **options: object) -> NoReturn:
        """Refuse: a cache keeps samples by their numbers, and a stream has none.

        Raises:
            OptionError: it says what to use.
        """
        raise OptionError(
            f"samples of {self.where} have no numbers, by which a cache keeps them; open TFRecord and lines of JSON "
            "with index=True, `penstock convert` others into Parquet or HDF5, or keep list(stream) where it fits"
        )

    # ── epochs ──────────────────────────────────────────────────────────────────────────────────────────────

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; without it each pass increments the epoch.

        Persistent workers increment it themselves. torch's DataLoader does not pass the epoch to workers that are not
        persistent: for a seeded stream, call this before each epoch.
        """
        self.epoch = to_epoch(epoch)
        self.is_epoch_set = True

    def begin_epoch(self, number: int) -> int:
        """Begin the pass of epoch `number`: penstock's DataLoader, which counts, calls it before each."""
        self.epoch, self.is_epoch_set = number, False
        return number

    def share_out(self, group: tuple[int, int] | None) -> None:
        """Have the next passes share out the shards over a group of ranks: penstock's DataLoader calls it before them.

        Args:
            group: this process's rank in it, and how many there are; None for all ranks.
        """
        self._group = group

    @property
    def draws_order(self) -> bool:
        """Whether the order of a pass depends on torch's random state."""
        return self.order.shuffle and self.order.seed is None

    # ── what it holds ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def schema(self) -> Schema:
        """The fields of its first sample."""
        plain = self._copy()
        plain.order = ReadOrder()
        for sample in _SamplePass(plain, plain._records(PassSpec())):
            return schema_of(sample, self.where)
        raise SourceError(f"{self.where} has no samples, and so no fields")

    def __len__(self) -> int:
        """Return the samples of this rank in the next pass, where the records of all shards are known.

        Raises:
            TypeError: a shard's are not, or samples are filtered; torch then treats the length as unknown.
        """
        counts = [shard.count for shard in self.shards]
        if None in counts or any(kind == "filter" for kind, _ in self._stages):
            raise TypeError(f"the length of {self.where} is known only when it has been read")
        rank, ranks = self._rank()
        spec = PassSpec(seed=self.order.seed or 0, epoch=self.epoch, rank=rank, ranks=ranks)
        mine = assign_ranges(self.order, len(self.shards), spec)
        return sum(len(range(one.first, counts[one.shard] or 0, one.step)) for one in mine)

    def close(self) -> None:
        """Close what this process has opened."""
        if self._current is not None:
            self._current.close()
            self._current = None

    # ── passes and their state ──────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[Any]:
        saved, self._resume_from = self._resume_from, None
        if saved is None:
            records = self._records(self._pass_spec())
        else:
            position = Position.from_state(saved["position"])
            records = self._records(PassSpec(**saved["spec"]), position, saved["splits"])
        self.epoch, self.is_epoch_set = records.spec.epoch + 1, False
        self._current = _SamplePass(self, records)
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """Return where this process's current pass is (or the next one, when none is under way)."""
        current = self._current
        if current is None:
            return {"version": _STATE_VERSION, "shards": self._shards_digest(), "epoch": self.epoch, "pass": None}
        saved = {
            "spec": dict(current.spec),
            "position": current.records.position.to_state(),
            "splits": [[*split] for split in current.records.splits],
        }
        return {"version": _STATE_VERSION, "shards": current.shards, "epoch": self.epoch, "pass": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass resume where `state` was taken.

        Raises:
            SourceError: it is the state of other shards.
        """
        if state.get("version") != _STATE_VERSION or state.get("shards") != self._shards_digest():
            raise SourceError(f"this is no state of {self.where}, with {len(self.shards)} shards: {str(state)[:200]}")
        self.epoch = int(state["epoch"])
        self._resume_from = state["pass"]

    def traits(self) -> dict[str, Any]:
        """Return what has to be equal where a pass is resumed: the shards, and the order in which they are read."""
        stages = "|".join(kind for kind, _ in self._stages)
        return {"shards": self._shards_digest(), **asdict(self.order), "stages": stages}

    def initial_state(
        self, *, epoch: int, base_seed: int, rank: int, ranks: int, worker: int, workers: int
    ) -> dict[str, Any]:
        """Return the state in which a worker of a rank begins a pass.

        A shuffled stream without a seed derives its order from `base_seed`, that of the loader's workers.
        """
        seed = base_seed if self.draws_order else self.order.seed or 0
        spec = PassSpec(seed=seed, epoch=epoch, rank=rank, ranks=ranks, worker=worker, workers=workers)
        begin = {"spec": asdict(spec), "position": Position().to_state(), "splits": []}
        return {"version": _STATE_VERSION, "shards": self._shards_digest(), "epoch": epoch + 1, "pass": begin}

    def split_state(self, state: dict[str, Any], consumers: int) -> list[dict[str, Any]]:
        """Return states of `consumers` that divide what is left after `state`: each keeps every `consumers`-th record.

        Each of them reads all records, and makes samples only of its own.
        """
        saved = state["pass"]
        return [
            {**state, "pass": {**saved, "splits": [*saved["splits"], [turn, consumers, 0]]}}
            for turn in range(consumers)
        ]

    def _records(
        self, spec: PassSpec, position: Position | None = None, splits: Sequence[Sequence[int]] = ()
    ) -> RecordPass:
        return RecordPass(self.read, self.shards, self.order, spec, position, splits)

    def _pass_spec(self) -> PassSpec:
        rank, ranks = self._rank()
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if not self.draws_order:
            seed = self.order.seed or 0
        elif info is not None:
            seed = info.seed - info.id  # the same in all workers of a loader
        else:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        return PassSpec(seed=seed, epoch=self.epoch, rank=rank, ranks=ranks, worker=worker, workers=workers)

    def _shards_digest(self) -> str:
        names = "\n".join(shard.name.rpartition("/")[2] for shard in self.shards)
        return f"{len(self.shards)} shards, {hashlib.sha256(names.encode()).hexdigest()[:16]}"

    def _rank(self) -> tuple[int, int]:
        if self._group is not None:
            return self._group
        if self._ranks is not None and get_worker_info() is not None:
            rank, ranks = self._ranks
        else:
            rank, ranks = rank_and_world_size()
        if ranks == 1:
            return rank, ranks
        is_shared_out, all_ranks_read = is_shared_out_by_another()
        if not is_shared_out:
            return rank, ranks
        if all_ranks_read and self.draws_order:
            raise OptionError(
                f"{self.where} is shared out over {ranks} ranks by Accelerate or Hugging Face's Trainer, each of which "
                "reads all samples, and every rank has drawn another order; give shuffle(seed=...)"
            )
        return 0, 1

    def _with_stage(self, kind: Literal["map", "filter"], function: Callable[[Any], Any]) -> Stream:
        other = self._copy()
        other._stages = (*self._stages, (kind, function))
        return other

    def _copy(self) -> Stream:
        other = copy.copy(self)
        other._current = other._resume_from = None
        other._ranks = self._ranks  # copy.copy calls __getstate__, which fills them in
        other.skipped = 0
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the current pass, and with this process's rank, which a worker process cannot look up."""
        return {**self.__dict__, "_current": None, "_ranks": self._rank()}


class _SamplePass:
    """An iterator over samples: records without the broken ones, through the stream's stages."""

    def __init__(self, stream: Stream, records: RecordPass) -> None:
        self.records = records
        self.spec = asdict(records.spec)
        self.shards = stream._shards_digest()
        self._stream = stream

    def __iter__(self) -> _SamplePass:
        return self

    def __next__(self) -> Any:
        stream = self._stream
        while True:
            record = next(self.records)
            if isinstance(record, RecordError):
                if stream.errors == "raise":
                    raise record
                stream.skipped += 1
                warnings.warn(f"left out: {record}", stacklevel=2)
                continue
            if not stream._stages:
                return record
            is_kept, sample = _apply(stream._stages, record)
            if is_kept:
                return sample

    def close(self) -> None:
        self.records.close()


def _apply(stages: Sequence[Stage], sample: Any) -> tuple[bool, Any]:
    """Return whether every filter keeps a sample, and what the maps make of it."""
    for kind, function in stages:
        if kind == "map":
            sample = function(sample)
        elif not function(sample):
            return False, sample
    return True, sample
