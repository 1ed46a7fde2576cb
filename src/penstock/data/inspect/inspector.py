"""Inspects a data set: opens it, and summarizes the fields of some samples."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError
from penstock.data.convert.records import known_counts, source_files
from penstock.data.inspect.field_summary import FieldSummary
from penstock.data.inspect.inspection import Inspection
from penstock.data.open import open as open_source
from penstock.data.schema import Sample
from penstock.data.select_format import select_format
from penstock.data.source import Source
from penstock.data.storage.storage import Storage
from penstock.data.stream import Stream

_MAX_SAMPLES = 256
_MAX_SECONDS = 1.0
_MAX_ERRORS = 3


def inspect(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    samples: int = 3,
    options: Mapping[str, Any] | None = None,
) -> Inspection:
    """Inspect a data set.

    Args:
        path: as for `penstock.open`.
        format: recognized by the name where it is None.
        samples: how many to keep as examples.
        options: of the format.

    Raises:
        SourceError: nothing is at the path, or nothing of a known format.
        ExtraError: a package is missing.
        OptionError: `samples` is negative.

    Example:
        >>> import pathlib
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "in.jsonl").write_text('{"x": 1.5}')
        ...     inspection = inspect(f"{folder}/in.jsonl")
        >>> inspection.format, inspection.fields["x"].types
        ('jsonl', ['float64'])
    """
    if samples < 0:
        raise OptionError(f"samples={samples} has to be 0 or more")
    path = os.fspath(path)
    storage = Storage()
    kind, paths = select_format(path, format, storage)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        source = open_source(path, format=format, **dict(options or {}))
    with closing(source):
        fields: dict[str, FieldSummary] = {}
        examples: list[Sample] = []
        errors: list[str] = []
        samples_read = 0
        for record in _some_records(source, samples):
            if isinstance(record, RecordError):
                errors += [str(record)][: _MAX_ERRORS - len(errors)]
                continue
            samples_read += 1
            examples += [record][: samples - len(examples)]
            for name, value in record.items():
                fields.setdefault(name, FieldSummary()).add(value)
        runs = source.chunk_starts if isinstance(source, Source) else None
        files, counts = source_files(kind, paths, storage), known_counts(source)
        return Inspection(
            path=path,
            format=kind.name,
            files=files["files"],
            nbytes=files["nbytes"],
            samples=None if counts is None else sum(counts),
            is_stream=isinstance(source, Stream),
            chunks=None if runs is None else len(runs) - 1,
            samples_read=samples_read,
            fields=fields,
            examples=examples,
            errors=errors,
            notes=[*getattr(source, "notes", ()), *(str(one.message) for one in warned)],
        )


def _some_records(source: Source | Stream, min_count: int) -> Generator[Sample | RecordError, None, None]:
    """Yield records for a second, `min_count` at least: evenly spread ones of a source, the first ones of a stream."""
    started = 0.0
    if isinstance(source, Source):
        count = len(source)
        wanted = min(count, max(min_count, _MAX_SAMPLES))
        numbers = [count * number // wanted for number in _spread(wanted)] if wanted else []
        records = (_read_or_error(source, number) for number in numbers)
    else:
        records = _first_records(source)
    for number, record in enumerate(records):
        started = started or time.monotonic()  # not counting the first record, which may have to be downloaded
        yield record
        if number + 1 >= min_count and (number + 1 >= _MAX_SAMPLES or time.monotonic() - started > _MAX_SECONDS):
            break
    records.close()


def _first_records(stream: Stream) -> Generator[Sample | RecordError, None, None]:
    for shard in stream.shards:
        try:
            yield from stream.read(shard, 0, 1)
        except RecordError as error:
            yield error


def _read_or_error(source: Source, index: int) -> Sample | RecordError:
    try:
        sample: Sample = source.read(index)
    except RecordError as error:
        return error
    return sample


def _spread(count: int) -> list[int]:
    """Return the numbers below `count` in an order whose first few are spread out, beginning with 0."""
    return [0, *(1 + np.random.default_rng(0).permutation(count - 1)).tolist()]
