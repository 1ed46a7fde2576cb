"""A source: samples by number. What formats have in common, and what can be put on top of any of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import Dataset

from penstock.core.errors import RecordError, SourceError
from penstock.feed.sources.sample import Errors, Sample, Schema, schema_of
from penstock.feed.sources.stream import Shard, Stream

_BLOCK = 1024
_STATE = 1
_INHERITED: list[Any] = []
_Handle = TypeVar("_Handle")


class Source(Dataset[Any]):
    """Samples by number: a dataset for any DataLoader, torch's or penstock's.

    A format gives `__len__` and `read`. `read` is called in any process and thread, many at a time: what must not cross
    a fork or be shared between processes lies in a `PerProcess`. A source can be pickled, and travels without handles.
    """

    where = "this source"
    """What it is, for messages: a path."""

    _position = _start = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Any:
        """Return sample `index`, which lies in `range(len(self))`.

        Raises:
            RecordError: it is truncated or corrupt.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        count = len(self)
        number = index + count if index < 0 else index
        if not 0 <= number < count:
            raise IndexError(f"sample {index} of {self.where}, which has {count}")
        return self.read(number)

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples, in order; from where `load_state_dict` was told."""
        start, self._start = self._start, 0
        for index in range(start, len(self)):
            self._position = index + 1
            yield self[index]
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return where this process's iteration is; what a loader's sampler has drawn is the sampler's to know."""
        return {"version": _STATE, "of": len(self), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where `state` was taken.

        Raises:
            SourceError: it is the state of something else.
        """
        if (state.get("version"), state.get("of")) != (_STATE, len(self)):
            raise SourceError(f"this is no state of {self.where}, with {len(self)} samples: {str(state)[:200]}")
        self._start = self._position = int(state["position"])

    @property
    def schema(self) -> Schema:
        """The fields of its samples; of the first one, where the format does not say it of all."""
        if not len(self):
            raise SourceError(f"{self.where} has no samples, and so no fields")
        return schema_of(self[0])

    @property
    def runs(self) -> np.ndarray | None:
        """Where each run of samples that are read together begins, and the number of samples; None without runs."""
        return None

    def map(self, function: Callable[[Any], Any]) -> Mapped:
        """Return a source of `function(sample)` for each sample; called anew each time one is asked for."""
        return Mapped(self, function)

    def filter(self, function: Callable[[Any], bool], *, fields: Sequence[str] | None = None) -> Picked:
        """Return the samples for which `function(sample)` is true, in their order. All are read once, now.

        Args:
            function: is given a sample.
            fields: those that `function` looks at: where a format can, only these are read.
        """
        seen = self if fields is None else self.narrow(fields)
        return Picked(self, [index for index in range(len(seen)) if function(seen[index])])

    def narrow(self, fields: Sequence[str]) -> Source:
        """Return a source with these fields only; a format that can leaves the others unread."""
        return Mapped(self, _Narrow(tuple(fields)))

    def select(self, indices: Sequence[int]) -> Picked:
        """Return a source of the samples with these numbers, in this order."""
        return Picked(self, indices)

    def stream(self, *, errors: Errors = "raise") -> Streamed:
        """Return the samples one after another: shared out over ranks and workers, and with a state to resume from."""
        return Streamed(self, errors)

    def close(self) -> None:
        """Close what this process has opened; it is opened again when it is needed."""


class Streamed(Stream):
    """The samples of a source as a stream; its runs (or else blocks of samples) are the shards.

    >>> class Letters(Source):
    ...     def __len__(self):
    ...         return 3
    ...
    ...     def read(self, index):
    ...         return "abc"[index]
    >>> stream = Letters().stream()
    >>> first = next(iter(stream))
    >>> stream.load_state_dict(stream.state_dict())
    >>> first, list(stream)
    ('a', ['b', 'c'])
    """

    def __init__(self, source: Source, errors: Errors = "raise") -> None:
        runs = source.runs
        starts = np.append(np.arange(0, len(source), _BLOCK), len(source)) if runs is None else runs
        self._source = source
        self._starts = starts
        self.where = source.where
        shards = [Shard(str(number), int(count)) for number, count in enumerate(np.diff(starts))]
        super().__init__(shards, errors=errors)

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Any]:
        """Yield samples of a run, and what is wrong with one in its place."""
        start, stop = (int(at) for at in self._starts[int(shard.name) : int(shard.name) + 2])
        for index in range(start + first, stop, step):
            try:
                yield self._source[index]
            except RecordError as error:
                yield error

    def close(self) -> None:
        """Close the source, too."""
        super().close()
        self._source.close()


class _Narrow:
    def __init__(self, fields: tuple[str, ...]) -> None:
        self._fields = fields

    def __call__(self, sample: Sample) -> Sample:
        return {name: sample[name] for name in self._fields}


class Mapped(Source):
    """Samples of another source, each given to a function.

    >>> Mapped([1, 2, 3], lambda number: number * 2)[2]
    6
    """

    def __init__(self, source: Source, function: Callable[[Any], Any]) -> None:
        self.where = getattr(source, "where", "this source")
        self._source = source
        self._function = function

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Any:
        """Return the function's result for a sample."""
        return self._function(self._source[index])

    @property
    def runs(self) -> np.ndarray | None:
        """The source's."""
        return self._source.runs

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class Picked(Source):
    """Some samples of another source.

    >>> Picked(["a", "b", "c"], [2, 0])[0]
    'c'
    """

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.where = getattr(source, "where", "this source")
        self._source = source
        self._indices = np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> Any:
        """Return a sample of the source."""
        return self._source[int(self._indices[index])]

    @property
    def runs(self) -> np.ndarray | None:
        """The source's, with what was picked of each; None where the order is another one."""
        starts = self._source.runs
        if starts is None or (np.diff(self._indices) <= 0).any():
            return None
        cuts = np.searchsorted(self._indices, starts)
        return np.unique(cuts)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class PerProcess(Generic[_Handle]):
    """Something that each process opens for itself: a file handle, an environment of a database.

    Args:
        make: opens it.
        close: closes it.

    >>> opened = PerProcess(lambda: [os.getpid()], lambda handle: handle.clear())
    >>> opened.get() == [os.getpid()]
    True
    """

    def __init__(self, make: Callable[[], _Handle], close: Callable[[_Handle], None]) -> None:
        self._make = make
        self._close = close
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._handle: _Handle | None = None

    def get(self) -> _Handle:
        """Return this process's own."""
        handle, pid = self._handle, os.getpid()
        if handle is not None and self._pid == pid:
            return handle
        if self._pid not in (0, pid):
            _INHERITED.append(handle)  # the parent's: its finalizer must not run here
            self._forget()
        with self._lock:
            if self._handle is None:
                self._handle, self._pid = self._make(), pid
            return self._handle

    def close(self) -> None:
        """Close this process's own, if it was opened."""
        handle, self._handle = self._handle, None
        if handle is not None and self._pid == os.getpid():
            self._close(handle)

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_close": self._close}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
