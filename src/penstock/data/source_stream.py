"""`SourceStream`: the samples of a source, one after another, in shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.numbered_samples import NumberedSamples
from penstock.data.schema import Errors
from penstock.data.stream import Shard, Stream

_BLOCK = 1024
_READ_TOGETHER = 32
"""Samples that are read together."""


class SourceStream(Stream):
    """The samples of a source as a stream; its chunks (or else blocks of samples) are the shards.

    >>> class Letters(NumberedSamples):
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

    def __init__(self, source: NumberedSamples, errors: Errors = "raise") -> None:
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
