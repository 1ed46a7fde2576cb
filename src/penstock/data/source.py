"""`Source`: samples by number, the sources that wrap another one (map, filter, select, cached), and one as a stream."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.sample_batch import entered, plain_indices, samples_ahead
from penstock.data.sample_cache.cached_dataset import CachedDataset, open_cached
from penstock.data.sample_cache.sample_cache import CacheInfo, Where
from penstock.data.sample_nbytes import nbytes_of
from penstock.data.schema import Errors, Sample, Schema, schema_of
from penstock.data.storage.object_batch import ObjectBatch, ObjectRequest
from penstock.data.stream import Shard, Stream
from penstock.distributed.rank import Distributed

_BLOCK = 1024
_BLOCK_NBYTES = 1 << 20
"""Of samples in order that are read together."""
_READ_TOGETHER = 32
"""Samples that a stream reads together."""
_STATE = 1


class Source(Dataset[Any]):
    """Samples by number: a dataset for any DataLoader, torch's or penstock's.

    A format implements `__len__` and `read`. `read` is called in any process, and by many threads at a time: what must
    not cross a fork or be shared between processes is kept in a `PerProcess`. A source can be pickled, without handles.
    """

    where = "this source"
    """Its path, for messages."""

    reads_batches = False
    """Whether `read_many` is faster than `read` for each: small samples, which are gathered."""

    _paths: Sequence[str] = ()
    """Of the files that samples are read from, where a format keeps them."""

    _start = 0
    _stop = 0
    _left: Iterator[Any] = iter(())
    """Of an iteration: the end of the block that was read, and what of it has not been returned."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Any:
        """Return sample `index`, an integer of `range(len(self))`.

        Raises:
            RecordError: it is truncated or corrupt.
        """
        raise NotImplementedError

    def read_many(self, indices: np.ndarray) -> list[Any]:
        """Return samples, with numbers of `range(len(self))`, as `read` does.

        Raises:
            SourceError: one of them is broken; `read` says which, and why.
        """
        return [self.read(index) for index in indices.tolist()]

    def read_range(self, start: int, stop: int) -> list[Any]:
        """Return samples from `start` to `stop`, or the first of them, as many as are read together with little work.

        Raises:
            SourceError: one of them is broken; `read` says which, and why.
        """
        return self.read_many(np.arange(start, stop))

    def path_of(self, index: int) -> str:
        """Return the path that a sample is read from, for messages, as far as it is known."""
        return self.where

    def read_paths(self) -> Sequence[str]:
        """Return the files and folders that samples are read from, by which a cache knows that they have changed."""
        return self._paths or [self.where]

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return those samples for which `read_many` runs no library's code that a damaged file may crash.

        A crash is then in `read`, of the sample that is to blame.
        """
        return indices

    def __getitem__(self, index: int) -> Any:
        if entered.source is self:
            sample = entered.samples.pop(index, self)
            if sample is not self:
                return sample
        count, number = len(self), operator.index(index)
        if number < 0:
            number += count
        if not 0 <= number < count:
            raise IndexError(f"sample {index} of {self.where}, which has {count}")
        return self.read(number)

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples, in order; from the position of `load_state_dict`, if that was called before."""
        start, self._start = self._start, 0
        end = len(self)
        size = 1 if self._gathers else end
        while start < end:
            stop = min(start + size, end)
            samples = self._together(self.read_range, start, stop)
            self._left = iter(samples or ())
            if samples is None:
                for index in range(start, stop):
                    self._stop = index + 1
                    yield self[index]
            else:
                size = max(1, min(_BLOCK, _BLOCK_NBYTES // max(1, nbytes_of(samples[-1]))))
                self._stop = stop = start + len(samples)
                del samples
                yield from self._left
            start = stop
        self._stop = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the position of an iteration, without the samples that it has read ahead."""
        state = {**self.__dict__, "_stop": self._position}
        state.pop("_left", None)
        return state

    @property
    def _gathers(self) -> bool:
        return self.reads_batches and not self.parts

    def read_block(self, block: range) -> list[Any] | None:
        """Return samples that are read together; None where they have to be read alone, or one of them is broken."""
        return self._together(self.read_many, np.arange(block.start, block.stop, block.step))

    def _together(self, read: Callable[..., list[Any]], *arguments: Any) -> list[Any] | None:
        try:
            return read(*arguments) if self._gathers else None
        except SourceError:  # raised again by the sample that it belongs to
            return None

    @property
    def _position(self) -> int:
        """How many samples the iteration has returned."""
        return self._stop - operator.length_hint(self._left)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this process's iteration. With a sampler, take the sampler's state instead."""
        return {"version": _STATE, "of": len(self), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration where `state` was taken.

        Raises:
            SourceError: it is the state of another source.
        """
        if (state.get("version"), state.get("of")) != (_STATE, len(self)):
            raise SourceError(f"this is no state of {self.where}, with {len(self)} samples: {str(state)[:200]}")
        self._start = self._stop = int(state["position"])
        self._left = iter(())

    @property
    def schema(self) -> Schema:
        """The fields of its samples; those of the first sample if the format stores none for all."""
        if not len(self):
            raise SourceError(f"{self.where} has no samples, and so no fields")
        return schema_of(self[0], self.where)

    @property
    def chunk_starts(self) -> np.ndarray | None:
        """Where each chunk of samples that are read together begins, and the number of samples; None without chunks."""
        return None

    @property
    def reads_objects(self) -> bool:
        """Whether samples are made of small remote files that can be fetched side by side, see `fetching`."""
        return False

    def object_requests(self, indices: Sequence[int]) -> list[ObjectRequest]:
        """Return the remote files that `read` reads whole for these samples, all of `range(len(self))`, in order."""
        return []

    def fetching(self, indices: Iterable[int]) -> AbstractContextManager[Any]:
        """Read these samples together, or their remote files side by side, for `self[index]` in the `with` block.

        It has an effect in this thread. The samples are the same as without, in the same order, and so are errors. Does
        nothing for other sources.
        """
        if self.reads_batches:
            return samples_ahead(self, indices)
        if not self.reads_objects:
            return ObjectBatch([])
        places = range(len(self))
        try:
            known = [places[index] for index in indices if -len(places) <= index < len(places)]
        except TypeError:  # reading it raises what it raises without a batch
            known = []
        return ObjectBatch(self.object_requests(known))

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Samples of a batch, as torch's DataLoader asks for them; None where they are as fast one by one."""
        return self._read_batch if self.reads_objects or self.reads_batches else None

    def _read_batch(self, indices: Sequence[int]) -> list[Any]:
        known = plain_indices(indices) if self._gathers else None
        if known is not None and len(known) and known.view(np.uint64).max() < len(self):  # negative ones are huge
            found = self._together(self.read_many, known)
            if found is not None:
                return found
        samples = []
        with self.fetching(indices):
            for index in indices:
                try:
                    samples.append(self[index])
                except Exception as error:
                    error.add_note(f"(penstock: raised for sample {index} of {self.where})")
                    raise
        return samples

    @property
    def parts(self) -> tuple[Any, ...]:
        """What its samples are made with, of which each may be a source: none for a format."""
        return ()

    @property
    def _parts_with_samples(self) -> list[Source]:
        return [part for part in self.parts if isinstance(part, Source)]

    @property
    def decodes_on(self) -> torch.device | None:
        """The GPU that samples are decoded on, by the training process alone; None for the host."""
        return next((part.decodes_on for part in self._parts_with_samples if part.decodes_on is not None), None)

    def set_epoch(self, epoch: int) -> None:
        """Have the samples of another epoch: of the mixtures in it. Other sources have the same in each."""
        for part in self._parts_with_samples:
            part.set_epoch(epoch)

    @property
    def is_epoch_set(self) -> bool:
        """Whether `set_epoch` was called since the last pass began: of a mixture in it."""
        return any(part.is_epoch_set for part in self._parts_with_samples)

    def begin_epoch(self, number: int) -> int | None:
        """Begin a pass: penstock's DataLoader calls it before its workers do.

        Args:
            number: of the epoch, if `set_epoch` was not called since the pass before.

        Returns:
            The epoch whose samples it has now; None where all epochs have the same.
        """
        for part in self._parts_with_samples:
            part.begin_epoch(number)
        return self.epoch

    @property
    def epoch(self) -> int | None:
        """The epoch whose samples it has now; None where all epochs have the same."""
        return next((part.epoch for part in self._parts_with_samples if part.epoch is not None), None)

    def close(self) -> None:
        """Close what this process has opened; it is opened again when it is needed."""

    # ── sources made of this one ────────────────────────────────────────────────────────────────────────────────

    def map(self, function: Callable[[Any], Any]) -> Mapped:
        """Return a source of `function(sample)` for each sample; it is called again each time a sample is read."""
        return Mapped(self, function)

    def filter(self, function: Callable[[Any], bool], *, fields: Sequence[str] | None = None) -> Subset:
        """Return the samples for which `function(sample)` is true, in their order. All are read once, now.

        Args:
            function: gets a sample.
            fields: those that `function` needs: a format that can reads only these.
        """
        read = self if fields is None else self.select_fields(fields)
        return Subset(self, [index for index in range(len(read)) if function(read[index])])

    def select_fields(self, fields: Sequence[str]) -> Source:
        """Return a source with these fields only; a format that can does not read the others."""
        return Mapped(self, _SelectFields(tuple(fields)))

    def select(self, indices: Sequence[int]) -> Subset:
        """Return a source of the samples with these numbers, in this order."""
        return Subset(self, indices)

    def cached(
        self,
        where: Where,
        *,
        after: Literal["decode", "map"] = "decode",
        limit: int | str | None = None,
        path: str | os.PathLike[str] | None = None,
        distributed: Distributed = False,
    ) -> Source:
        """Return the same source, which makes each sample once: all workers read it from then on; see `cached`.

        Args:
            where: "ram" or "disk".
            after: "decode" keeps what the format decodes: the functions of `map` are called each time a sample is read.
                "map" keeps what they return.
            limit: of the bytes of all samples.
            path: the file, for "disk".
            distributed: the ranks of each machine share one in "ram".

        Raises:
            OptionError: an argument is out of range, or the samples are others in each epoch.
            SourceError: the file is something else, another user's, or has other samples.
            TransportError: there is no shared memory.
        """
        if after not in ("decode", "map"):
            raise OptionError(f"samples are cached after 'decode' or 'map', not after {after!r}")
        options: dict[str, Any] = {"where": where, "limit": limit, "path": path, "distributed": distributed}
        return self._cached(partial(open_cached, **options), is_before_map=after == "decode")

    def _cached(self, opened: Callable[[Any], CachedDataset], *, is_before_map: bool) -> Source:
        if self.epoch is not None:
            raise OptionError(
                f"the samples of {self.where} are others in each epoch, and a cache would keep those of one; cache its "
                "sources, and mix these"
            )
        if self.decodes_on is not None:
            raise OptionError(
                f"the samples of {self.where} lie on {self.decodes_on}, and a cache keeps what lies on the host; open "
                "the source without device="
            )
        return Cached(self, opened(self))

    def stream(self, *, errors: Errors = "raise") -> SourceStream:
        """Return the samples one after another: distributed over ranks and workers, and with a state to resume from."""
        return SourceStream(self, errors)


class SourceStream(Stream):
    """The samples of a source as a stream; its chunks (or else blocks of samples) are the shards.

    >>> class Letters(Source):
    ...     def __len__(self):
    ...         return 3
    ...
    ...     def read(self, index):
    ...         return "abc"[index]
    >>> stream = SourceStream(Letters())
    >>> first = next(iter(stream))
    >>> stream.load_state_dict(stream.state_dict())
    >>> first, list(stream)
    ('a', ['b', 'c'])
    """

    def __init__(self, source: Source, errors: Errors = "raise") -> None:
        chunk_starts = source.chunk_starts
        blocks = np.append(np.arange(0, len(source), _BLOCK), len(source))
        starts = blocks if chunk_starts is None else chunk_starts
        self._source = source
        self._starts = starts
        self.where = source.where
        shards = [Shard(str(number), int(count)) for number, count in enumerate(np.diff(starts))]
        super().__init__(shards, errors=errors)

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Any]:
        """Yield samples of a shard, and a RecordError in the place of a broken one."""
        start, stop = (int(at) for at in self._starts[int(shard.name) : int(shard.name) + 2])
        for at in range(start + first, stop, step * _READ_TOGETHER):
            block = range(at, min(stop, at + step * _READ_TOGETHER), step)
            samples = self._source.read_block(block)
            for number, index in enumerate(block):
                try:
                    yield self._source[index] if samples is None else samples[number]
                except RecordError as error:
                    yield error

    def close(self) -> None:
        """Close the source, too."""
        super().close()
        self._source.close()


class _SelectFields:
    def __init__(self, fields: tuple[str, ...]) -> None:
        self._fields = fields

    def __call__(self, sample: Sample) -> Sample:
        return {name: sample[name] for name in self._fields}


class _Derived(Source):
    """Samples made of those of another source, or of any dataset with numbers."""

    def __init__(self, source: Any) -> None:
        self.where = getattr(source, "where", "this source")
        self._source: Source = source

    def __len__(self) -> int:
        return len(self._source)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What it calls: the source."""
        return (self._source,)

    def _own(self, indices: Iterable[int]) -> Iterable[int]:
        """Return the numbers that samples have in the source; without those that are not samples."""
        return indices

    @property
    def reads_objects(self) -> bool:
        source: object = self._source
        return isinstance(source, Source) and source.reads_objects

    @property
    def reads_batches(self) -> bool:  # type: ignore[override]
        source: object = self._source
        return isinstance(source, Source) and source.reads_batches

    def object_requests(self, indices: Sequence[int]) -> list[ObjectRequest]:
        return self._source.object_requests([*self._own(indices)]) if self.reads_objects else []

    def fetching(self, indices: Iterable[int]) -> AbstractContextManager[Any]:
        return self._source.fetching(self._own(indices)) if self.reads_batches else super().fetching(indices)

    @property
    def chunk_starts(self) -> np.ndarray | None:
        return self._source.chunk_starts

    def path_of(self, index: int) -> str:
        source: object = self._source
        return next(map(source.path_of, self._own([index]))) if isinstance(source, Source) else self.where

    def close(self) -> None:
        """Close the source. What a cache keeps stays."""
        self._source.close()


class Mapped(_Derived):
    """A function of each sample of another source.

    >>> Mapped([1, 2, 3], lambda number: number * 2)[2]
    6
    """

    def __init__(self, source: Source, function: Callable[[Any], Any]) -> None:
        super().__init__(source)
        self._function = function

    @property
    def parts(self) -> tuple[Any, ...]:
        """What it calls: the source and the function."""
        return self._source, self._function

    def _cached(self, opened: Callable[[Any], CachedDataset], *, is_before_map: bool) -> Source:
        # Leaving out fields is part of decoding.
        if not is_before_map or isinstance(self._function, _SelectFields):
            return super()._cached(opened, is_before_map=is_before_map)
        return Mapped(_cached_part(self._source, opened), self._function)

    def read(self, index: int) -> Any:
        """Return the function's result for a sample."""
        return self._function(self._source[index])


class Subset(_Derived):
    """Some samples of another source.

    >>> Subset(["a", "b", "c"], [2, 0])[0]
    'c'
    """

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        super().__init__(source)
        self._indices = np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def _cached(self, opened: Callable[[Any], CachedDataset], *, is_before_map: bool) -> Source:
        if not is_before_map:
            return super()._cached(opened, is_before_map=is_before_map)
        return Subset(_cached_part(self._source, opened), self._indices.tolist())

    def _own(self, indices: Iterable[int]) -> Iterable[int]:
        known = plain_indices(indices)
        if known is None:
            return []
        own = self._indices[known[(known >= 0) & (known < len(self))]]
        return np.where(own < 0, own + len(self._source), own).tolist()  # type: ignore[no-any-return]

    def read(self, index: int) -> Any:
        """Return a sample of the source."""
        return self._source[int(self._indices[index])]

    @property
    def chunk_starts(self) -> np.ndarray | None:
        """The source's chunks, with the samples selected of each; None if these are in another order."""
        starts = self._source.chunk_starts
        if starts is None or (np.diff(self._indices) <= 0).any():
            return None
        cuts = np.searchsorted(self._indices, starts)
        return np.unique(cuts)


class Cached(_Derived):
    """Another source's samples, each made once; `Source.cached` makes it."""

    reads_batches = False

    def __init__(self, source: Source, samples: CachedDataset) -> None:
        super().__init__(source)
        self._samples = samples

    def read(self, index: int) -> Any:
        """Return the sample that is kept; make and keep it if there is none."""
        return self._samples[index]

    def object_requests(self, indices: Sequence[int]) -> list[ObjectRequest]:
        """Return the source's, for the samples that are not kept yet."""
        return super().object_requests([index for index in indices if not self._samples.has(index)])

    def cache_info(self) -> CacheInfo:
        """Return what the cache has done, in all processes: hits, misses, entries, nbytes, limit_nbytes, full."""
        return self._samples.cache_info()


def _cached_part(source: Any, opened: Callable[[Any], CachedDataset]) -> Any:
    return source._cached(opened, is_before_map=True) if isinstance(source, Source) else opened(source)


def cached(
    dataset: Any,
    where: Where,
    *,
    limit: int | str | None = None,
    path: str | os.PathLike[str] | None = None,
    distributed: Distributed = False,
) -> Any:
    """Return the same dataset, which makes each sample once: all workers read it from then on, in any DataLoader.

    Calling it is your word that a sample is the same whenever it is made. So put what is random after it: a dataset
    whose `__getitem__` returns `augment(cached[index])`, or `source.cached(...).map(augment)`. A sample that draws from
    torch's, NumPy's or Python's generator, or from `penstock.sample_rng()`, while it is made is refused. A generator of
    the dataset's own is not seen, nor is a change of epoch: its first sample is kept.

    Each sample that is returned is a copy, so it may be written to. Nothing is removed to make room: in a shuffled
    epoch each sample is needed as much as any other. When a sample does not fit, no more are added; those that are not
    there are made each time, as without a cache. A process that is killed leaves no wrong sample.

    - "ram": in memory of this program and its workers (processes or threads), freed with the last of them. It takes
      pages as it fills. Programs have one each, and ranks too, unless `distributed=True`.
    - "disk": in the file `path`, on a disk of this machine. It stays, and several programs and ranks may use and fill
      it at the same time. It holds samples of one dataset: a file of one with another class, length, code, indices, or
      with other or changed local files is refused. Also, each process makes two samples anew, and compares them. A
      path in /dev/shm is memory that ranks share; it stays until it is removed, too. The file is this user's alone.

    Samples are plain: tensors, NumPy arrays and scalars, numbers, text, bytes, dates, paths, Pillow images, and lists,
    tuples and dicts of these. Caches hold no pickle: anything else is refused.

    Args:
        dataset: with `__len__` and `__getitem__`. A source that `penstock.open` returns is cached before the functions
            of its `map`: see `Source.cached`. Of another dataset all that `__getitem__` does is cached, its transforms
            too. Indices that are not numbers from 0 to its length are passed on to it. If it has `__getitems__`, that
            is called with the indices that are missing. Its other attributes can be read.
        where: "ram" or "disk".
        limit: of the bytes of all samples: a number, or text as in "8GiB". None is half of what is free.
        path: the file, for "disk".
        distributed: all ranks of the job (or of a process group, or of a mesh of one dimension) call this at the same
            time, and those of each machine share one in "ram", of one `limit`.

    Returns:
        A dataset, with `cache_info()`: hits, misses, entries, nbytes, limit_nbytes, full.

    Raises:
        OptionError: the dataset is iterable or has a state, its samples are random, or an argument is out of range.
        SourceError: the file is something else, another user's, or has other samples.
        TransportError: there is no shared memory.
        UnpicklableError: a sample has something else in it.

    >>> import penstock
    >>> squares = penstock.cached([number * number for number in range(10)], "ram", limit="1MiB")
    >>> [squares[3], squares[3]], squares.cache_info().hits, squares.cache_info().misses
    ([9, 9], 1, 1)
    """
    if isinstance(dataset, Source):
        return dataset.cached(where, limit=limit, path=path, distributed=distributed)
    return open_cached(dataset, where=where, limit=limit, path=path, distributed=distributed)
