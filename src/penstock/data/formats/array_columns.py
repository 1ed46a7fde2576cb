"""What groups of HDF5 and Zarr have in common: which arrays are fields, ragged arrays, and how fields are written.

Ragged arrays are a group with the attribute "penstock_ragged", their shape with -1 where they differ, and in it

    values     the elements of all arrays, one after another
    offsets    int64 (samples,): where each begins in `values`
    shapes     int64 (samples, dimensions)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.chunked_rows import ChunkedRows, RaggedValues
from penstock.data.formats.column_source import ArrayLayout, Column
from penstock.data.rows import translate_errors
from penstock.data.schema import Field, Sample, Schema, fitted

RAGGED = "penstock_ragged"

_SHOWN = 50
"""Arrays in an error."""

OpenRows = Callable[[Any, Any, Any], ChunkedRows]
"""Returns what reads the rows of an array, given its layout, the file as a process has it open, and a cache."""


def readable(columns: Mapping[str, Column | str], where: str, *, may_lack: bool = True) -> dict[str, Column]:
    """Return what can be fields; warn of the others, which state why they cannot, or raise SourceError."""
    unread = [column for column in columns.values() if isinstance(column, str)]
    held = {name: column for name, column in columns.items() if not isinstance(column, str)}
    if unread and not (held and may_lack):
        raise SourceError("; ".join(unread))
    if len({column.count for column in held.values()}) > 1:
        counts = ", ".join(f"{name!r} has {column.count}" for name, column in [*held.items()][:_SHOWN])
        more = f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
        raise SourceError(
            f"{where}: a sample is a row of each array, and these differ in their rows: {counts}{more}; choose arrays "
            "of one length with fields=, or a group of them"
        )
    for why in unread:
        warnings.warn(f"left out: {why}", stacklevel=3)
    return held


def ragged_column(
    where: str, path: str, parts: Sequence[ArrayLayout], open_rows: OpenRows, shape: Sequence[int], kind: str = "array"
) -> Column:
    """Return the column of ragged arrays, given where their values, offsets and shapes lie in the file.

    Raises:
        SourceError: they have other types or shapes.
    """
    values, offsets, shapes = parts
    whole = np.dtype(np.int64)
    if (
        kind not in ("array", "bytes")
        or values.shape
        or values.dtype.kind not in "biufc"
        or (offsets.shape, offsets.dtype) != ((), whole)
        or (shapes.shape, shapes.dtype) != ((len(shape),), whole)
        or shapes.count != offsets.count
    ):
        raise SourceError(f"{where} is no group of ragged arrays: its datasets have other shapes or types")
    sizes = tuple(None if size < 0 else int(size) for size in shape)
    field = Field("bytes") if kind == "bytes" else Field("array", values.dtype.newbyteorder("=").name, sizes)
    opened = partial(_open_ragged, path, field, parts, open_rows)
    return Column(array=values, field=field, count=offsets.count, open=opened)


def _open_ragged(
    path: str, field: Field, parts: Sequence[ArrayLayout], open_rows: OpenRows, file: Any, cache: Any
) -> RaggedValues:
    counts = parts[0].count, parts[1].count
    return RaggedValues(path, parts[0].name, field, counts, [open_rows(one, file, cache) for one in parts])


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


class ColumnWriter:
    """Writes samples, field by field, to columns that a format makes: they have `add` for a value, and `finish`."""

    def __init__(self, path: str, schema: Schema, reason: str) -> None:
        if reason:
            raise SourceError(f"{path}: {reason}")
        self._path = path
        self._translate_errors = partial(translate_errors, f"{path} cannot be written")
        self._schema = dict(schema)
        self._columns: dict[str, Any] = {}

    def write(self, sample: Sample) -> None:
        """Add a sample."""
        values = fitted(self._schema, sample, self._path)
        with self._translate_errors():
            for name, column in self._columns.items():
                column.add(values[name])

    def close(self) -> None:
        """Finish the file."""
        with self._translate_errors():
            for column in self._columns.values():
                column.finish()
