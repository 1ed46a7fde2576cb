"""Writes samples as the rows of an Arrow table, group by group: what the writers of Parquet and Arrow files share.

See types.py for what arrays become.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.arrow.table import translate_arrow_errors
from penstock.data.formats.arrow.types import ARRAY_METADATA, VARIABLE_TENSOR, Layout, unit_type
from penstock.data.optional import need
from penstock.data.schema import Field, Sample, Schema, fitted

GROUP_NBYTES = 8 << 20
"""Of samples in a group; it ends earlier at GROUP_ROWS."""
GROUP_ROWS = 1024

_DTYPES = {"float16": "halffloat", "float32": "float", "float64": "double"}
_MOST_NBYTES = 1 << 30


def why_unsupported(schema: Schema) -> str:
    """Return why samples of this schema would not come back as they were; "" if they would.

    >>> why_unsupported({"x": Field("array", "float16", (None, 2))})
    ''
    >>> why_unsupported({"x": Field("number", "complex64")})
    "field 'x' is complex64, which Arrow has no type for"
    """
    for name, field in schema.items():
        if field.kind in ("array", "number") and field.dtype.startswith(("complex", "float128", "longdouble")):
            return f"field {name!r} is {field.words()}, which Arrow has no type for"
        if len(field.shape) > 32:
            return f"field {name!r} has {len(field.shape)} dimensions; 32 are the most"
        if field.nbytes() > _MOST_NBYTES:
            return f"field {name!r} has {field.nbytes()} bytes a sample; {_MOST_NBYTES} are the most"
    return "" if schema else "without a field, nobody knows how many samples there are"


class TableWriter:
    """Collects samples, and writes them in groups of about 8 MiB or 1024 rows.

    `make_sink` makes pyarrow's writer of the format, given Arrow's schema.

    Raises:
        SourceError: samples of this schema cannot be written.
    """

    def __init__(self, path: str, schema: Schema, layout: Layout, make_sink: Callable[[Any], Any]) -> None:
        if why_unsupported(schema):
            raise SourceError(f"{path}: {why_unsupported(schema)}")
        self._path = path
        self._schema = schema
        self._layout: Layout = layout
        fields = [_field(name, field, layout) for name, field in schema.items()]
        self._arrow = need("pyarrow", "parquet").schema(fields)
        self._sink = make_sink(self._arrow)
        self._rows: list[Sample] = []
        self._nbytes = 0

    def write(self, sample: Sample) -> None:
        """Add a sample."""
        row = {name: _copied(value) for name, value in fitted(self._schema, sample, self._path).items()}
        self._rows.append(row)
        self._nbytes += sum(map(_nbytes, row.values()))
        if len(self._rows) >= GROUP_ROWS or self._nbytes >= GROUP_NBYTES:
            self._flush()

    def close(self) -> None:
        """Finish the file."""
        try:
            self._flush()
        finally:
            with translate_arrow_errors(self._path, "it cannot be written"):
                self._sink.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        pa = need("pyarrow", "parquet")
        with translate_arrow_errors(self._path, "it cannot be written"):
            columns = [
                _array([row[name] for row in self._rows], self._schema[name], field.type, self._layout)
                for name, field in zip(self._schema, self._arrow, strict=True)
            ]
            self._sink.write_batch(pa.record_batch(columns, schema=self._arrow))
        self._rows.clear()
        self._nbytes = 0


def _copied(value: Any) -> Any:
    """Return a value that the caller cannot change any more."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray | np.generic) else len(value)


def _field(name: str, field: Field, layout: Layout) -> Any:
    pa = need("pyarrow", "parquet")
    if field.kind == "text":
        return pa.field(name, pa.string())
    if field.kind == "bytes":
        return pa.field(name, pa.binary())
    number = pa.type_for_alias(_DTYPES.get(field.dtype, field.dtype))
    if field.kind == "number":
        return pa.field(name, unit_type(field.unit) or number)
    metadata = {ARRAY_METADATA: replace(field, unit="").words().encode()}
    if field.is_ragged or (layout == "tensors" and 0 in field.shape):
        data = pa.list_(number) if layout == "tensors" else pa.binary()
        type = pa.struct([("data", data), ("shape", pa.list_(pa.int32(), len(field.shape)))])
        if layout == "tensors":
            metadata |= {b"ARROW:extension:name": VARIABLE_TENSOR, b"ARROW:extension:metadata": b"{}"}
    elif layout == "tensors":
        type = pa.fixed_shape_tensor(number, list(field.shape))
    else:
        type = pa.binary(field.nbytes() or -1)
    return pa.field(name, type, metadata=metadata)


def _array(values: list[Any], field: Field, type: Any, layout: Layout) -> Any:
    pa = need("pyarrow", "parquet")
    if field.kind in ("text", "bytes"):
        return pa.array(values, type)
    if field.kind == "number":
        return pa.array(np.array(values, field.dtype)).view(type)
    arrays = [np.ascontiguousarray(value, field.dtype) for value in values]
    if isinstance(type, pa.BaseExtensionType):
        flat = pa.array(np.stack(arrays).reshape(-1), type.value_type)
        return pa.ExtensionArray.from_storage(type, pa.FixedSizeListArray.from_arrays(flat, type=type.storage_type))
    if not pa.types.is_struct(type):
        return pa.array([array.tobytes() for array in arrays], type)
    shapes = np.array([array.shape for array in arrays], np.int32).reshape(-1)
    shape = pa.FixedSizeListArray.from_arrays(pa.array(shapes), type=type.field("shape").type)
    if layout == "raw":
        data = pa.array([array.tobytes() for array in arrays], pa.binary())
    else:
        ends = np.cumsum([0, *(array.size for array in arrays)]).astype(np.int32)
        flat = pa.array(np.concatenate([array.reshape(-1) for array in arrays]), type.field("data").type.value_type)
        data = pa.ListArray.from_arrays(pa.array(ends), flat, type=type.field("data").type)
    return pa.StructArray.from_arrays([data, shape], fields=[type.field("data"), type.field("shape")])
