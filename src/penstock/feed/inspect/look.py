"""What a data set holds: its files and fields, and numbers over some of its samples."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.feed.inspect.layout import layout_of
from penstock.feed.inspect.speed import Speed, in_order, measured
from penstock.feed.sources.base import Source
from penstock.feed.sources.formats import chosen, files_of
from penstock.feed.sources.open import open as open_source
from penstock.feed.sources.sample import Sample, field_of, plain
from penstock.feed.sources.storage import Storage, is_remote
from penstock.feed.sources.stream import Stream

_LOOKED_AT = 256
_LOOK_S = 1.0
_VALUES = 1 << 16


@dataclass(slots=True)
class FieldSeen:
    """What one field held in the samples that were looked at."""

    types: list[str] = field(default_factory=list)
    """As in "float32[3, 5..7]"; several where samples disagree."""
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    """Of numbers that are finite."""
    not_finite: int = 0
    """NaNs and infinities."""
    sizes: tuple[int, int] | None = None
    """The least and the most characters of text, or bytes of bytes."""
    samples: int = 0
    """In how many samples it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found at a path."""

    path: str
    format: str
    files: int
    nbytes: int
    """Of the files."""
    samples: int | None
    """None where only reading all would tell."""
    is_stream: bool
    """Whether samples come in order only."""
    runs: int | None
    """Chunks or row groups: samples that are read together."""
    layout: dict[str, str]
    """What the format says about chunks and compression, by field."""
    looked_at: int
    """Samples that `fields` tells of."""
    fields: dict[str, FieldSeen]
    shown: list[Sample]
    """Some samples."""
    broken: list[str]
    """Records that could not be looked at, and why; the first few."""
    speeds: list[Speed]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; samples as `told` says them."""
        from penstock.feed.inspect.text import told

        return {
            "schema": "penstock.inspect/1",
            **{name: getattr(self, name) for name in ("path", "format", "files", "nbytes", "samples", "is_stream")},
            "runs": self.runs,
            "layout": self.layout,
            "looked_at": self.looked_at,
            "fields": {name: asdict(seen) for name, seen in self.fields.items()},
            "shown": [{name: told(value) for name, value in sample.items()} for sample in self.shown],
            "broken": self.broken,
            "speeds": [
                {**asdict(speed), "samples_per_s": speed.samples_per_s, "nbytes_per_s": speed.nbytes_per_s}
                for speed in self.speeds
            ],
        }


def inspect(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    samples: int = 3,
    seconds: float = 2.0,
    options: Mapping[str, Any] | None = None,
) -> Inspection:
    """Look at a data set.

    Args:
        path: as for `penstock.open`.
        format: told from the name where it is None.
        samples: how many to keep.
        seconds: how long to measure the speed in order, and as long at random; 0 for not at all.
        options: the format's own.

    Raises:
        SourceError: there is nothing, or nothing of a known format.
        ExtraError: a package is missing.
        OptionError: a number that cannot be.

    Example:
        >>> import pathlib
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "in.jsonl").write_text('{"x": 1.5}')
        ...     found = inspect(f"{folder}/in.jsonl", seconds=0)
        >>> found.format, found.fields["x"].types
        ('jsonl', ['float64'])
    """
    if samples < 0 or seconds < 0:
        raise OptionError(f"samples={samples} and seconds={seconds:g} have to be 0 or more")
    path = os.fspath(path)
    storage = Storage()
    kind, paths = chosen(path, format, storage)
    source = open_source(path, format=format, **dict(options or {}))
    with closing(source):
        fields: dict[str, FieldSeen] = {}
        shown: list[Sample] = []
        broken: list[str] = []
        looked_at = 0
        for record in _some(source, samples):
            if isinstance(record, RecordError):
                broken += [str(record)][: 3 - len(broken)]
                continue
            looked_at += 1
            shown += [record][: samples - len(shown)]
            for name, value in record.items():
                _see(fields.setdefault(name, FieldSeen()), value)
        runs = source.runs if isinstance(source, Source) else None
        files = files_of(kind, paths, storage)
        return Inspection(
            path=path,
            format=kind.name,
            files=len(files),
            nbytes=_nbytes(files, storage),
            samples=_count(source),
            is_stream=isinstance(source, Stream),
            runs=None if runs is None else len(runs) - 1,
            layout=layout_of(kind.name, paths),
            looked_at=looked_at,
            fields=fields,
            shown=shown,
            broken=broken,
            speeds=measured(source, seconds) if seconds else [],
        )


def _some(source: Source | Stream, least: int) -> Iterator[Sample | RecordError]:
    """Yield some samples: spread evenly where they have numbers, else the first ones; for a second, and `least`."""
    began = 0.0
    if isinstance(source, Source):
        count = len(source)
        wanted = min(count, max(least, _LOOKED_AT))
        numbers = [count * number // wanted for number in _shuffled(wanted)] if wanted else []
        records: Iterator[Sample | RecordError] = (_read(source, number) for number in numbers)
    else:
        records = in_order(source)
    for number, record in enumerate(records):
        began = began or time.monotonic()  # the first one has to be fetched
        yield record
        if number + 1 >= least and (number + 1 >= _LOOKED_AT or time.monotonic() - began > _LOOK_S):
            break
    close = getattr(records, "close", None)
    if close is not None:
        close()


def _shuffled(count: int) -> list[int]:
    """Return numbers below `count` so that any first few of them are spread out; 0 comes first."""
    return [0, *(1 + np.random.default_rng(0).permutation(count - 1)).tolist()]


def _read(source: Source, index: int) -> Sample | RecordError:
    try:
        sample: Sample = source.read(index)
    except RecordError as error:
        return error
    return sample


def _see(seen: FieldSeen, value: Any) -> None:
    """Take in one sample's value."""
    seen.samples += 1
    try:
        value = plain(value)
    except SourceError:  # a format may give lists, as of text
        _see_type(seen, type(value).__qualname__)
        return
    if not isinstance(value, np.ndarray | np.generic):
        size = len(value)
        seen.sizes = (size, size) if seen.sizes is None else (min(seen.sizes[0], size), max(seen.sizes[1], size))
        _see_type(seen, field_of(value).words())
        return
    _see_type(seen, field_of(value).words())
    numbers = np.asarray(value).reshape(-1)
    if numbers.dtype.kind == "c" or not numbers.size:
        return
    numbers = numbers[:: -(-numbers.size // _VALUES)].astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    seen.not_finite += numbers.size - finite.size
    if finite.size:
        least, most, mean = float(finite.min()), float(finite.max()), float(finite.mean())
        seen.least = least if seen.least is None else min(seen.least, least)
        seen.most = most if seen.most is None else max(seen.most, most)
        seen.mean = mean if seen.mean is None else seen.mean + (mean - seen.mean) / seen.samples


def _see_type(seen: FieldSeen, words: str) -> None:
    """Note a type; sizes that differ become ranges."""
    head, _, sizes = words.partition("[")
    for number, known in enumerate(seen.types):
        known_head, _, known_sizes = known.partition("[")
        if known_head == head and known_sizes.count(",") == sizes.count(",") and bool(known_sizes) == bool(sizes):
            seen.types[number] = _spanned(head, known_sizes, sizes) if sizes.strip("]") else words
            return
    seen.types.append(words)


def _spanned(head: str, known: str, new: str) -> str:
    """Return a type with ranges of sizes.

    >>> _spanned("uint8", "3, 4..5]", "3, 7]")
    'uint8[3, 4..7]'
    """
    spans = []
    for old, size in zip(known.rstrip("]").split(", "), new.rstrip("]").split(", "), strict=True):
        low, _, high = old.partition("..")
        least, most = min(int(low), int(size)), max(int(high or low), int(size))
        spans.append(str(least) if least == most else f"{least}..{most}")
    return f"{head}[{', '.join(spans)}]"


def _count(source: Source | Stream) -> int | None:
    if isinstance(source, Source):
        return len(source)
    counts = [shard.count for shard in source.shards]
    return None if None in counts else sum(count or 0 for count in counts)


def _nbytes(files: list[str], storage: Storage) -> int:
    remote = [file for file in files if is_remote(file)]
    own = [file for file in files if not is_remote(file) and os.path.exists(file)]  # a link may lead nowhere
    return sum(stamp.nbytes for stamp in storage.stamps([*remote, *own]))
