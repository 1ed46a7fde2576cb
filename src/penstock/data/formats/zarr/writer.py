"""Writes samples to a Zarr group of version 3; the layout is described in source.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from penstock.data.formats.array_columns import RAGGED, ColumnWriter
from penstock.data.formats.row_blocks import ObjectBlocks, RaggedBlocks, RowBlocks
from penstock.data.optional import need
from penstock.data.schema import DTYPES, Field, Schema


def why_unsupported(schema: Schema) -> str:
    """Return why samples of this schema would not come back from Zarr as they were; "" if they would.

    >>> why_unsupported({"x": Field("text")}), why_unsupported({"a/b": Field("text")})
    ('', "'a/b' cannot be the name of a Zarr array")
    """
    if not schema:
        return "samples have no fields"
    for name, field in schema.items():
        if not name.isprintable() or not name or "/" in name or "\\" in name or set(name) == {"."} or name[:2] == "__":
            return f"{name!r} cannot be the name of a Zarr array"
        if field.kind in ("array", "number") and field.dtype not in DTYPES:
            return f"field {name!r} has the type {field.dtype}"
    return ""


class ZarrWriter(ColumnWriter):
    """Writes samples to a new Zarr group.

    Args:
        path: of its folder; what is there is overwritten.
        schema: of every sample.

    Raises:
        SourceError: Zarr cannot hold such samples.
    """

    def __init__(self, path: str, schema: Schema) -> None:
        super().__init__(path, schema, why_unsupported(schema))
        with self._translate_errors():
            group = need("zarr", "zarr").open_group(path, mode="w", zarr_format=3)
            self._columns = {name: _column(group, name, field) for name, field in schema.items()}


def _column(group: Any, name: str, field: Field) -> Any:
    if field.kind == "text":
        return ObjectBlocks(partial(_make, group, name), _append, "string", _checked)
    dtype = np.dtype(np.uint8 if field.kind == "bytes" else field.dtype)
    if field.kind != "bytes" and not field.is_ragged:
        return RowBlocks(partial(_make, group, name), _append, dtype, tuple(size or 0 for size in field.shape))
    shape = (None,) if field.kind == "bytes" else field.shape
    inner = group.create_group(name)
    inner.attrs[RAGGED] = {"kind": field.kind, "shape": [-1 if size is None else size for size in shape]}
    return RaggedBlocks(partial(_make, inner), _append, dtype, len(shape))


def _make(group: Any, name: str, row: tuple[int, ...], chunk: tuple[int, ...], dtype: Any) -> Any:
    return group.create_array(name, shape=(0, *row), chunks=chunk, dtype=dtype)


def _checked(text: str) -> str:
    text.encode()
    return text


def _append(array: Any, rows: np.ndarray) -> None:
    start = array.shape[0]
    array.resize((start + len(rows), *array.shape[1:]))
    if rows.size:
        array[start:] = rows.astype(array.dtype, copy=False)
