"""Zarr: the arrays of a group are the fields of its samples, and their rows are the samples. Versions 2 and 3.

fields      arrays of numbers, and of strings and bytes of one dimension, which all have the same number of rows;
            an array that is not in a group is the field "array". Dates and durations are their integers (int64), in the
            unit that the schema states, as are `units`, `scale_factor` and so on of netCDF's conventions; `_Unsigned`
            integers are unsigned. What no field can hold is left out with a warning; a group with an array that the
            zarr package cannot open needs fields=
reading     by the zarr package, chunk (or shard) by chunk; a chunk is unpacked once and kept a while
chunk_starts   those of the largest field
ZarrWriter      version 3, chunks of about 1 MiB. Arrays and numbers are arrays, text is an array of strings. Bytes, and
            arrays whose shapes differ, are a group, see array_columns.py; the attribute is {"kind", "shape"}
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np

from penstock.core.errors import PenstockError, RecordError, SourceError
from penstock.data.formats.array_columns import RAGGED, ragged_column, readable
from penstock.data.formats.chunked_rows import ChunkedRows, Values, native, unsigned
from penstock.data.formats.column_source import (
    ArrayLayout,
    Column,
    ColumnSource,
    FileColumns,
    stated_field,
)
from penstock.data.optional import need
from penstock.data.rows import LIBRARY_ERRORS, ChunkCache
from penstock.data.schema import Errors, Field, Selection
from penstock.data.storage.storage import Storage, is_remote

_NUMBERS = "biufc"
_ARROWS = tuple((1, unit) for unit in ("s", "ms", "us", "ns"))
"""Units that Arrow has, too."""

_PIECE_NBYTES = 4 << 10
"""What the zarr package takes beside the values for each chunk that it reads: 2.6 kB were seen."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    max_record_nbytes: int = 1 << 30,
    chunk_cache_nbytes: int = 256 << 20,
    more_codecs: Sequence[str] = (),
) -> ColumnSource:
    """Open Zarr groups.

    Args:
        paths: of the groups: folders, or URLs.
        storage: expands paths; the zarr package itself reads from URLs.
        fields: which arrays; by default all, which then need the same number of rows.
        errors: unused: reading a broken sample raises RecordError.
        max_record_nbytes: larger rows of chunks are refused, and no codec unpacks a chunk to more.
        chunk_cache_nbytes: the most that unpacked chunks of one field take, in each process.
        more_codecs: names of codecs to let through, beside those of which it is known what they unpack to: some take
            any memory, and "pickle" runs code, so only for groups from somebody trusted.

    Raises:
        SourceError: there is no such group, it is broken, or its arrays cannot be fields.
        ExtraError: the zarr package is not installed.
    """
    local = [path if is_remote(path) else storage.local(path) for path in paths]
    limits = _Limits(max_record_nbytes, tuple(more_codecs))
    groups = [_probe_group(path, fields, limits) for path in local]
    return ColumnSource(groups, partial(_OpenGroup, limits), chunk_cache_nbytes)


class _Limits(NamedTuple):
    max_nbytes: int
    more_codecs: tuple[str, ...]


class _OpenGroup:
    """A group, whose arrays are opened when they are read. Any thread may: the zarr package reads in its own."""

    def __init__(self, limits: _Limits, info: FileColumns) -> None:
        self.path, self._limits = info.path, limits
        self._root: Any = None
        self._arrays: dict[str, Any] = {}

    def read(self, array: ArrayLayout, number: int) -> np.ndarray:
        from penstock.data.formats.zarr.bounded_codecs import TooLargeError, bounded  # imports zarr

        name, start = array.name, number * array.chunk[0]
        try:
            if self._root is None:
                self._root = _open_group(self.path)
            if name not in self._arrays:
                found = self._root[name] if hasattr(self._root, "groups") else self._root
                self._arrays[name] = bounded(found, f"{self.path}: array {name!r}", *self._limits)
            return np.asarray(self._arrays[name][start : start + array.chunk[0]])
        except LIBRARY_ERRORS as error:
            is_ours = isinstance(error, TooLargeError)
            words = str(error) if is_ours else f"zarr raised {type(error).__name__}: {error}"
            raise RecordError(self.path, -1, f"{name}[{start}]", words) from error


def _open_rows(array: ArrayLayout, group: _OpenGroup, cache: ChunkCache[Any]) -> ChunkedRows:
    empty = np.empty((0, *array.shape), array.dtype)
    return ChunkedRows(empty, array.chunk[0], partial(group.read, array), cache, (group.path, array.name))


def _open_values(array: ArrayLayout, field: Field, group: _OpenGroup, cache: ChunkCache[Any]) -> Values:
    is_unsigned = array.dtype.kind == "i" and field.dtype.startswith("u")
    decode = unsigned if is_unsigned else partial(_decode, field.kind)
    return Values(_open_rows(array, group, cache), decode, group.path, array.name)


def _decode(kind: str, values: np.ndarray) -> Sequence[Any] | np.ndarray:
    if kind == "bytes":
        return [*map(bytes, values)]
    if kind == "text":
        return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    if values.dtype.kind in "mM":
        if np.isnat(values).any():
            raise ValueError("it is NaT, which is no number")
        values = values.view(values.dtype.str[0] + "i8")
    return cast(np.ndarray, native(values))


# ── what is there ───────────────────────────────────────────────────────────────────────────────────────────


_FILE_SYSTEMS: set[Any] = set()
"""Of remote groups. A forked child must not finalize what its parent has open: aiohttp complains."""


def _open_group(path: str) -> Any:
    zarr = need("zarr", "zarr")
    try:
        root = zarr.open(path, mode="r")
    except LIBRARY_ERRORS:
        with suppress(*LIBRARY_ERRORS):  # metadata of all arrays in one place have one that zarr cannot open
            return zarr.open_group(path, mode="r", use_consolidated=False)
        raise
    if is_remote(path):
        _FILE_SYSTEMS.add(root.store.fs)
    return root


def _probe_group(path: str, fields: Selection, limits: _Limits) -> FileColumns:
    try:
        there = _find_arrays(_open_group(path), fields)
        found = {new: _column(path, own, there[own], limits) for new, own in fields.names(there, path).items()}
    except PenstockError:
        raise
    except Exception as error:
        if not (is_remote(path) or isinstance(error, LIBRARY_ERRORS)):  # clients of storage have errors of their own
            raise
        hint = "" if fields.chosen else "; with fields= no other array is opened than those that it names"
        name = "" if fields.chosen or is_remote(path) else _name_unopened(path)
        words = f"{f'array {name!r}: ' if name else ''}{type(error).__name__}: {error}{hint}"
        raise SourceError(f"{path} cannot be read as Zarr: {words}") from error
    if not found:
        raise SourceError(f"{path} has no arrays with rows")
    return FileColumns(path=path, columns=readable(found, path, may_lack=fields.chosen is None))


def _name_unopened(path: str) -> str:
    """Return the name of an array of a folder that the zarr package cannot open, which its errors do not give."""
    with suppress(*LIBRARY_ERRORS):
        groups = [("", _open_group(path))]
        for prefix, group in groups:
            for name in sorted(os.listdir(os.path.join(path, prefix))):
                folder = os.path.join(path, prefix, name)
                if not any(os.path.exists(os.path.join(folder, one)) for one in (".zarray", ".zgroup", "zarr.json")):
                    continue
                try:
                    member = group[name]
                except LIBRARY_ERRORS:
                    return f"{prefix}{name}"
                if hasattr(member, "groups"):
                    groups.append((f"{prefix}{name}/", member))
    return ""


def _find_arrays(root: Any, fields: Selection) -> dict[str, Any]:
    """Return arrays, and groups of ragged ones, by their paths: those that are wanted, or all if one is not there."""
    if isinstance(root, need("zarr", "zarr").Array):
        return {"array": root}
    if fields.chosen is None:
        return _list_arrays(root)
    chosen = {own: root.get(own) for _, own in fields.chosen}
    return chosen if all(one is not None and _has_rows(one) for one in chosen.values()) else _list_arrays(root)


def _list_arrays(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for own, inner in sorted(group.members(), key=itemgetter(0)):
        if _has_rows(inner):
            found[f"{prefix}{own}"] = inner
        elif hasattr(inner, "groups"):
            found |= _list_arrays(inner, f"{prefix}{own}/")
    return found


def _has_rows(one: Any) -> bool:
    return RAGGED in one.attrs if hasattr(one, "groups") else bool(one.shape)


def _column(path: str, name: str, one: Any, limits: _Limits) -> Column | str:
    if RAGGED in one.attrs:
        parts = [_layout(path, f"{name}/{part}", one[part], limits) for part in ("values", "offsets", "shapes")]
        stated = one.attrs[RAGGED]
        return ragged_column(f"{path}: {name!r}", path, parts, _open_rows, stated["shape"], stated["kind"])
    field = _field(one)
    if field is None:
        shape = one.shape[1:]
        return f"{path}: array {name!r} holds {one.dtype} of shape {shape} in each sample, which no field can hold"
    array = _layout(path, name, one, limits)
    return Column(array=array, field=field, count=array.count, open=partial(_open_values, array, field))


def _layout(path: str, name: str, array: Any, limits: _Limits) -> ArrayLayout:
    from penstock.data.formats.zarr.bounded_codecs import bounded  # imports zarr

    count, *shape = array.shape
    whole = array.shards or array.chunks
    sizes = [whole[0], *map(max, whole[1:], shape)]  # a chunk may reach beyond its array
    pieces = math.prod(-(-size // piece) for size, piece in zip(sizes, array.chunks, strict=True))
    fill = array.fill_value if isinstance(array.fill_value, (str, bytes)) else ""
    nbytes = math.prod(sizes) * (int(array.dtype.itemsize) + len(fill)) + (pieces - 1) * _PIECE_NBYTES
    if nbytes > limits.max_nbytes:
        raise SourceError(
            f"{path}: array {name!r} is read in chunks of all columns, {nbytes} bytes in {pieces}; "
            f"{limits.max_nbytes} are the most; raise max_record_nbytes if that is right"
        )
    bounded(array, f"{path}: array {name!r}", *limits)
    chunk = (int(whole[0]), *shape)  # or a row of them
    return ArrayLayout(name=name, count=int(count), shape=tuple(shape), dtype=array.dtype, chunk=chunk)


def _field(array: Any) -> Field | None:
    dtype, shape = array.dtype, tuple(array.shape[1:])
    if dtype.kind in "mM":
        name, count = np.datetime_data(dtype)
        is_arrow = (count, name) in _ARROWS
        unit = (
            f"{'timestamp' if dtype.kind == 'M' else 'duration'}[{name}]" if is_arrow else str(dtype.newbyteorder("="))
        )
        return Field("array" if shape else "number", "int64", shape, unit)
    if dtype.kind in _NUMBERS:
        field, attributes = (
            Field("array" if shape else "number", dtype.newbyteorder("=").name, shape),
            dict(array.attrs),
        )
        if "_ARRAY_DIMENSIONS" in attributes and array.metadata.zarr_format == 2 and array.fill_value is not None:
            attributes["_FillValue"] = array.fill_value  # where xarray keeps it
        return stated_field(field, attributes)
    if shape or dtype.kind not in "TUSO":
        return None
    return Field("bytes" if dtype.kind == "O" else "text")
