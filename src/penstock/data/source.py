"""`Source`: samples by number, and the sources that wrap another one (map, filter, select, cached)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.core.errors import OptionError
from penstock.data.numbered_samples import NumberedSamples
from penstock.data.sample_batch import plain_indices
from penstock.data.sample_cache.cached_dataset import CachedDataset, open_cached
from penstock.data.sample_cache.sample_cache import CacheInfo, Where
from penstock.data.schema import Errors, Sample
from penstock.data.source_stream import SourceStream
from penstock.data.storage.object_batch import ObjectRequest
from penstock.distributed.rank import Distributed


class Source(NumberedSamples):
    """Samples by number: a dataset for any DataLoader, torch's or penstock's.

    A format implements `__len__` and `read`. `read` is called in any process, and by many threads at a time: what must
    not cross a fork or be shared between processes is kept in a `PerProcess`. A source can be pickled, without handles.
    """

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
