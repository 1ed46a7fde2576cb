"""A source as numbered records: how every process opens it, and reads any stretch of it.

Records have numbers from 0 on, through all shards of a stream in their order. A broken record keeps its number.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError
from penstock.feed.sources.base import Source
from penstock.feed.sources.open import open as open_source
from penstock.feed.sources.sample import Sample, Schema
from penstock.feed.sources.stream import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a source is opened, the same way in every process."""

    path: str | tuple[str, ...]
    format: str | None = None
    """Told from the name where it is None."""
    fields: tuple[tuple[str, str], ...] | None = None
    """(name in the sample, name in the file) of those that are read; None for all."""
    options: str = "{}"
    """The format's own, as JSON."""

    @classmethod
    def of(
        cls,
        path: str | tuple[str, ...],
        *,
        format: str | None = None,
        fields: Mapping[str, str] | list[str] | tuple[str, ...] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Recipe:
        """Return the recipe for `penstock.open(path, ...)`.

        Raises:
            OptionError: an option's value is nothing that JSON can say.
        """
        chosen: tuple[tuple[str, str], ...] | None = None
        if fields is not None:
            chosen = tuple(fields.items()) if isinstance(fields, Mapping) else tuple((name, name) for name in fields)
        try:
            words = json.dumps(dict(options or {}), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise OptionError(f"options travel to other processes as JSON, and {error}") from error
        return cls(path=path, format=format, fields=chosen, options=words)

    def open(self) -> Source | Stream:
        """Return the source."""
        path = list(self.path) if isinstance(self.path, tuple) else self.path
        fields = None if self.fields is None else dict(self.fields)
        return open_source(path, format=self.format, fields=fields, **json.loads(self.options))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Records of one shard, numbered within it; a map-style source is shard 0."""

    shard: int
    first: int
    stop: int | None
    """None for the shard's end."""
    step: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How many records each shard has."""

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """The records of all."""
        return sum(self.counts)

    def stretches(self, first: int, stop: int) -> tuple[Stretch, ...]:
        """Return where records `first` to `stop` lie.

        >>> Layout((3, 0, 4)).stretches(2, 5)
        (Stretch(shard=0, first=2, stop=3, step=1), Stretch(shard=2, first=0, stop=2, step=1))
        """
        ends = np.cumsum(self.counts)
        found = []
        for shard in range(int(np.searchsorted(ends, first, "right")), len(self.counts)):
            begin = int(ends[shard]) - self.counts[shard]
            if begin >= stop:
                break
            low, high = max(first - begin, 0), min(stop - begin, self.counts[shard])
            if low < high:
                found.append(Stretch(shard, low, high))
        return tuple(found)


class Reader:
    """Reads stretches of one source in one process. A stretch that begins where the last one ended is gone on with."""

    def __init__(self, recipe: Recipe) -> None:
        self.source = recipe.open()
        self._going: tuple[int, int, Iterator[Sample | RecordError]] | None = None

    def records(self, stretch: Stretch) -> Iterator[Sample | RecordError]:
        """Yield a stretch's samples, and a RecordError in the place of one that is broken.

        Raises:
            RecordError: nothing after it can be read.
        """
        if isinstance(self.source, Stream):
            return self._streamed(self.source, stretch)
        return self._picked(self.source, stretch)

    def close(self) -> None:
        """Close the source."""
        self._leave()
        self.source.close()

    def _picked(self, source: Source, stretch: Stretch) -> Iterator[Sample | RecordError]:
        stop = len(source) if stretch.stop is None else stretch.stop
        for index in range(stretch.first, stop, stretch.step):
            try:
                yield source.read(index)
            except RecordError as error:
                yield error

    def _streamed(self, stream: Stream, stretch: Stretch) -> Iterator[Sample | RecordError]:
        going, self._going = self._going, None
        if going is not None and going[:2] == (stretch.shard, stretch.first) and stretch.step == 1:
            records = going[2]
        else:
            _close(going[2] if going is not None else None)
            records = stream.read(stream.shards[stretch.shard], stretch.first, stretch.step)
        count = None if stretch.stop is None else len(range(stretch.first, stretch.stop, stretch.step))
        ended = False
        try:
            yield from islice(records, count)
            ended = True
        finally:
            if ended and stretch.stop is not None and stretch.step == 1:
                self._going = (stretch.shard, stretch.stop, records)
            else:
                _close(records)

    def _leave(self) -> None:
        going, self._going = self._going, None
        _close(going[2] if going is not None else None)


def _close(records: Iterator[Any] | None) -> None:
    with contextlib.suppress(AttributeError):  # a generator has it, other iterators need not
        records.close()  # type: ignore[union-attr]


def layout_of(recipe: Recipe, counts: tuple[int, ...]) -> Layout:
    """Return the layout of files that have so many samples each."""
    with closing(recipe.open()) as source:
        return Layout((sum(counts),) if isinstance(source, Source) else counts)


def declared(source: Source | Stream) -> Schema | None:
    """Return the schema that holds for all samples, where the format says it; None where only reading tells."""
    base = Stream if isinstance(source, Stream) else Source
    return source.schema if type(source).schema is not base.schema else None


def known_layout(source: Source | Stream) -> Layout | None:
    """Return how many records there are, where that is known without reading."""
    if isinstance(source, Source):
        return Layout((len(source),))
    counts = [shard.count for shard in source.shards]
    return None if None in counts else Layout(tuple(count or 0 for count in counts))
