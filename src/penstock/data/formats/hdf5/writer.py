"""Writes samples to an HDF5 file, in datasets that any program reads.

    array       a dataset (samples, *shape), in chunks of whole samples of about 1 MiB
    number      a dataset (samples,)
    text        strings of variable length, UTF-8. HDF5 ends a string at a NUL: one that belongs to the text is C0 80
    bytes       uint8 of variable length
    ragged      arrays whose shapes differ are a group, see array_columns.py; the attribute is their shape

A field's name is its path in the file: "left/image" is a dataset in a group.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.core.errors import OptionError
from penstock.data.formats.array_columns import RAGGED, ColumnWriter
from penstock.data.formats.row_blocks import ObjectBlocks, RaggedBlocks, RowBlocks
from penstock.data.optional import need
from penstock.data.schema import DTYPES, Field, Schema

_NUL, _OTHER_NUL = b"\0", b"\xc0\x80"


def why_unsupported(schema: Schema) -> str:
    """Return why samples of this schema would not come back from HDF5 as they were; "" if they would.

    >>> why_unsupported({"x": Field("text")}), why_unsupported({"a/": Field("text")})
    ('', "'a/' cannot be a path in an HDF5 file")
    """
    if not schema:
        return "samples have no fields"
    for name, field in schema.items():
        is_unicode = name.encode(errors="ignore").decode() == name
        if not is_unicode or not all(name.split("/")) or "." in name.split("/") or "\0" in name:
            return f"{name!r} cannot be a path in an HDF5 file"
        if any(name.startswith(f"{other}/") for other in schema):
            return f"a field whose name is the beginning of {name!r} leaves no place for it"
        if field.kind in ("array", "number") and field.dtype not in DTYPES:
            return f"field {name!r} has the type {field.dtype}"
    return ""


class HDF5Writer(ColumnWriter):
    """Writes samples to a new HDF5 file.

    Args:
        path: of the file; what is there is overwritten.
        schema: of every sample.
        compression: "gzip" packs arrays and numbers, with the shuffle filter before it; None packs nothing.
        level: of gzip, 1 (fast) to 9.

    Raises:
        SourceError: HDF5 cannot hold such samples.
        OptionError: there is no such compression.
    """

    def __init__(
        self, path: str, schema: Schema, *, compression: Literal["gzip"] | None = None, level: int = 4
    ) -> None:
        if compression not in (None, "gzip") or level not in range(1, 10):
            raise OptionError(f"compression={compression!r}, level={level}: has to be None or 'gzip', and 1 to 9")
        super().__init__(path, schema, why_unsupported(schema))
        packing = {"compression": "gzip", "compression_opts": level, "shuffle": True} if compression else {}
        with self._translate_errors():
            self._file = need("h5py", "hdf5").File(path, "w")
            try:
                self._columns = {name: _column(self._file, name, field, packing) for name, field in schema.items()}
            except BaseException:
                self._file.close()
                raise

    def close(self) -> None:
        """Finish the file."""
        try:
            super().close()
        finally:
            self._columns = {}
            with self._translate_errors():
                self._file.close()


def _column(file: Any, name: str, field: Field, packing: dict[str, Any]) -> Any:
    if field.kind in ("text", "bytes"):
        h5py = need("h5py", "hdf5")
        kind = h5py.string_dtype() if field.kind == "text" else h5py.vlen_dtype(np.uint8)
        return ObjectBlocks(partial(_make, file, {}, name), _append, kind, _encode)
    dtype = np.dtype(field.dtype)
    if not field.is_ragged:
        return RowBlocks(partial(_make, file, packing, name), _append, dtype, tuple(size or 0 for size in field.shape))
    group = file.create_group(name)
    group.attrs[RAGGED] = np.array([-1 if size is None else size for size in field.shape], np.int64)
    return RaggedBlocks(partial(_make, group, packing), _append, dtype, len(field.shape))


def _make(
    group: Any, packing: dict[str, Any], name: str, row: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype[Any]
) -> Any:
    most = (None, *(size or None for size in row))
    return group.create_dataset(name, (0, *row), dtype, maxshape=most, chunks=chunk, **packing)


def _encode(value: str | bytes) -> Any:
    return value.encode().replace(_NUL, _OTHER_NUL) if isinstance(value, str) else np.frombuffer(value, np.uint8)


def _append(dataset: Any, rows: np.ndarray) -> None:
    """Add rows to the end of h5py's `dataset`.

    Written below `dataset[...] =`, which makes one array of arrays of variable length where they happen to be as long.
    """
    h5py = need("h5py", "hdf5")
    start = dataset.shape[0]
    dataset.resize(start + len(rows), axis=0)
    if not rows.size:
        return
    inside = h5py.h5s.create_simple(rows.shape)
    there = dataset.id.get_space()
    there.select_hyperslab((start, *(0 for _ in rows.shape[1:])), rows.shape)
    dataset.id.write(inside, there, np.ascontiguousarray(rows), h5py.h5t.py_create(dataset.dtype))
