"""What a field of an HDF5 file is: from a dataset's rows to arrays, numbers, text and bytes.

numbers            an array of each row; of datasets of one dimension, a number. Enums are numbers, h5py's bool is bool.
                   What netCDF's attributes state of them: `stated_field`
strings            text: of variable length up to the first NUL, of fixed length without NULs (or what else fills it up)
                   at its end; datasets of more dimensions give lists of text. Those that `binary` names are bytes,
                   without NULs at the end, or lists of these
variable length    uint8 is bytes; other numbers are arrays of one dimension that differ in length
opaque             bytes
compound           a field for each part, "dataset/part"; with parts of variable length only if the file is trusted
the rest           references, and numbers that no tensor can hold (long double), are no fields
ragged             a group that HDF5Writer wrote, see writer.py: arrays that differ in shape
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.array_columns import RAGGED, ragged_column
from penstock.data.formats.chunked_rows import Values, native, unsigned
from penstock.data.formats.column_source import Column, stated_field
from penstock.data.formats.hdf5.dataset_rows import open_rows
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.heap import HEAP_REFERENCE, Heap
from penstock.data.formats.hdf5.layout import DatasetLayout, ProbedFile, read_layout
from penstock.data.optional import need
from penstock.data.rows import ChunkCache
from penstock.data.schema import DTYPES, Field

_NUMBERS = "biufc"
_BINARY = "binary"
_STATED = ("units", "calendar", "scale_factor", "add_offset", "_Unsigned", "_FillValue", "missing_value")
"""What `stated_field` asks for."""
_NUL = b"\xc0\x80", b"\0"
"""How a NUL that belongs to a text is stored, and what it is."""
_UNBOUNDED = (
    "holds values of variable length that only the HDF5 library can read, and it takes the memory that the file states "
    "for one, up to 4 GiB and more, before it looks for it; write them as a dataset of their own, packed by gzip or "
    "not at all, or pass external=True if this file is from somebody whom you trust"
)
"""Of parts of a compound, of other filters, of files with a user block or addresses of 4 bytes."""


def _open_values(
    layout: DatasetLayout, decode: Callable[[np.ndarray], Any], file: HDF5File, cache: ChunkCache[Any]
) -> Values:
    return Values(open_rows(layout, file, cache), decode, file.path, layout.name)


def _open_objects(
    layout: DatasetLayout,
    decode: Callable[[Heap, int, np.ndarray], list[Any]],
    itemsize: int,
    max_nbytes: int,
    file: HDF5File,
    cache: ChunkCache[Any],
) -> Values:
    return _open_values(layout, partial(decode, Heap(file, cache, max_nbytes), itemsize), file, cache)


# ── values of rows ──────────────────────────────────────────────────────────────────────────────────────────


def _decode(field: Field, parts: Sequence[str], values: np.ndarray) -> Sequence[Any] | np.ndarray:
    for part in parts:  # of a compound type, from outside to inside
        values = values[part]
    if field.kind in ("array", "number"):
        return cast(np.ndarray, native(values))
    if field.kind == "bytes":
        return [*map(bytes, values)]
    try:
        return _nested(bytes if _BINARY in field.unit else _decode_text, values)
    except UnicodeDecodeError as error:
        raise _no_text(error) from error


def _objects_decoder(
    field: Field, inner: np.dtype[Any], is_string: bool
) -> Callable[[Heap, int, np.ndarray], list[Any]]:
    """Return what makes values of references to the heap."""
    if field.kind == "object":
        return partial(_lists_of, _unpadded_of if _BINARY in field.unit else _texts_of)
    if field.kind == "text":
        return _texts_of
    if field.kind == "bytes":
        return _unpadded_of if is_string else _bytes_of
    return partial(_arrays_of, inner)


def _texts_of(heap: Heap, itemsize: int, references: np.ndarray) -> list[str]:
    found = heap.take(references, itemsize)
    try:
        return [one.partition(b"\0")[0].replace(*_NUL).decode() for one in found]
    except UnicodeDecodeError as error:
        raise _no_text(error) from error


def _bytes_of(heap: Heap, itemsize: int, references: np.ndarray) -> list[bytes]:
    return heap.take(references, itemsize)


def _unpadded_of(heap: Heap, itemsize: int, references: np.ndarray) -> list[bytes]:
    return [one.rstrip(b"\0") for one in heap.take(references, itemsize)]


def _arrays_of(dtype: np.dtype[Any], heap: Heap, itemsize: int, references: np.ndarray) -> list[np.ndarray]:
    return [native(np.frombuffer(bytearray(one), dtype)) for one in heap.take(references, itemsize)]


def _lists_of(
    decode: Callable[[Heap, int, np.ndarray], list[Any]], heap: Heap, itemsize: int, references: np.ndarray
) -> list[Any]:
    """Return the values of rows of several dimensions as lists of lists."""
    found: list[Any] = []
    for row in references:  # many references to one object are as many values
        heap.check(row, itemsize)
        values = np.empty(row.size, object)
        values[:] = decode(heap, itemsize, row.reshape(-1))
        found.append(values.reshape(row.shape).tolist())
    return found


def _no_text(error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"the string is no UTF-8, as text is: {error}; name the field in binary= for its bytes")


def _nested(decode: Callable[[Any], Any], values: np.ndarray) -> list[Any]:
    return [_nested(decode, one) if isinstance(one, np.ndarray) else decode(one) for one in values]


def _decode_text(value: Any) -> str:
    """Return text; h5py cuts that of variable length at a NUL."""
    return bytes(value).rstrip(b"\0").replace(*_NUL).decode()


# ── fields of datasets ──────────────────────────────────────────────────────────────────────────────────────


def read_columns(name: str, there: Any, file: ProbedFile) -> dict[str, Column | str]:
    """Return the fields that a dataset, or a group of ragged arrays, is to samples: one, or one for each part.

    For what no field can hold it is the reason.

    Raises:
        SourceError: it is too large, broken, or lies in another file.
    """
    if RAGGED in there.attrs:
        return {name: _ragged(there, file, name)}
    where = f"{file.path}: dataset {there.name!r}"
    reason = _why_unreadable(there)
    if reason:
        return {name: f"{where} {reason}"}
    leaf = _variable(there.dtype, there.shape[1:]) if there.dtype.kind == "O" else None
    if leaf is not None:
        field, inner = leaf
        is_string = field.kind in ("text", "object")
        field = _as_asked(field, name, file)
        layout = read_layout(there, file, name, on_heap=_is_on_heap(there))
        if layout.dtype == HEAP_REFERENCE:
            decode = _objects_decoder(field, inner, is_string)
            opened = partial(_open_objects, layout, decode, inner.itemsize, file.max_nbytes)
        elif not (file.external or 0 in there.shape):
            return {name: f"{where} {_UNBOUNDED}"}
        elif not inner.isnative:
            words = f"holds {inner.str} of variable length, of which h5py swaps no bytes, and only it can read them"
            return {name: f"{where} {words}"}
        else:
            opened = partial(_open_values, layout, partial(_decode, field, ()))
        return {name: Column(array=layout, field=field, count=layout.count, object_nbytes=file.nbytes, open=opened)}
    layout = read_layout(there, file, name)
    if layout.dtype.names and _has_variable(layout.dtype) and not (file.external or 0 in there.shape):
        return {name: f"{where} {_UNBOUNDED}"}
    found: dict[str, Column | str] = {}
    for parts, inner in _leaves(layout.dtype):
        held = _field(inner, layout.shape)
        if isinstance(held, str):
            part = "".join(f", part {part!r}" for part in parts)
            found["/".join((name, *parts))] = f"{where}{part} holds {held}, which no field can hold"
        else:
            held = _as_asked(held, "/".join((name, *parts)), file)
            is_plain = bool(held.dtype and not parts)
            field = stated_field(held, _stated(there, file)) if is_plain and not held.unit else held
            as_stored = native if field.dtype == held.dtype else unsigned
            opened = partial(_open_values, layout, as_stored if is_plain else partial(_decode, held, parts))
            column = Column(array=layout, field=field, count=layout.count, open=opened)
            found["/".join((name, *parts))] = column
    return found


def _as_asked(field: Field, name: str, file: ProbedFile) -> Field:
    if name not in file.binary or field.kind == "bytes":
        return field
    if field.kind == "object":
        return replace(field, unit=field.unit.replace("string", _BINARY))
    if field.kind != "text":
        raise SourceError(
            f"{file.path}: binary= names {name!r}, which is {field.words()}, and no string in each sample"
        )
    return Field("bytes")


def _stated(there: Any, file: ProbedFile) -> dict[str, Any]:
    found = _attributes(there, file, *_STATED)
    if "_Unsigned" in there.attrs and "_Unsigned" not in found and there.dtype.kind == "i":
        raise SourceError(
            f"{file.path}: {there.name!r} has _Unsigned as text of variable length, which is not read, as its length "
            "cannot be checked; write it as bytes (numpy.bytes_), or pass external=True if you trust the file"
        )
    return found


def _attributes(there: Any, file: ProbedFile, *names: str) -> dict[str, Any]:
    """Return what a dataset or group states of itself by these names, but for values of variable length.

    Of these the HDF5 library takes the memory that is stated before it looks for the value, up to 4 GiB.
    """
    held = [name for name in names if name in there.attrs]
    return {one: there.attrs[one] for one in held if file.external or not there.attrs.get_id(one).dtype.hasobject}


def _has_variable(dtype: np.dtype[Any]) -> bool:
    """Whether some values are of variable length; references, which are objects too, are not."""
    refers = need("h5py", "hdf5").check_ref_dtype
    return any(inner.base.hasobject and refers(inner.base) is None for _, inner in _leaves(dtype))


def _why_unreadable(dataset: Any) -> str:
    """Return why h5py cannot read a dataset, whatever its values are; "" if it may."""
    filters, created = need("h5py", "hdf5").h5z, dataset.id.get_create_plist()
    try:
        dtype = dataset.dtype
    except (TypeError, ValueError) as error:  # HDF5 has types that NumPy has not
        return f"holds what no field can hold: {error}"
    packed = [created.get_filter(number) for number in range(created.get_nfilters())]
    missing = [one for one in packed if not filters.filter_avail(one[0])]
    if missing and dataset.size and (_has_variable(dtype) or not _can_read(dataset)):
        code, _, _, name = missing[0]
        return (
            f"is packed by a filter that is not there ({code}, {name.decode(errors='replace') or 'no name'}); "
            "import the plugin that brings it (hdf5plugin) before the file is opened"
        )
    return ""


def _can_read(dataset: Any) -> bool:
    """Whether the library can read a first element: chunks may do without a filter that is missing."""
    try:
        dataset[(slice(1),) * dataset.ndim]
    except OSError:
        return False
    return True


def _leaves(dtype: np.dtype[Any], parts: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], np.dtype[Any]]]:
    if dtype.names is None:
        return [(parts, dtype)]
    return [leaf for part in dtype.names for leaf in _leaves(dtype[part], (*parts, part))]


def _field(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Field | str:
    """Return the field for rows of a type, or in words what they hold that no field can."""
    h5py = need("h5py", "hdf5")
    shape = (*shape, *dtype.shape)
    dtype = dtype.base
    name = dtype.newbyteorder("=").name
    if dtype.kind in _NUMBERS and name in DTYPES:
        names = h5py.check_enum_dtype(dtype)
        unit = "" if names is None else f"enum {', '.join(f'{one}={names[one]}' for one in sorted(names))}"
        return Field("array", name, shape, unit) if shape else Field("number", name, unit=unit)
    if dtype.kind == "S" or (dtype.kind == "O" and h5py.check_string_dtype(dtype) is not None):
        return _text_field(shape)
    if dtype.kind == "V" and dtype.names is None and not shape:
        return Field("bytes")
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    inner = h5py.check_vlen_dtype(dtype)
    words = str(dtype) if inner is None else f"{inner} of variable length"
    return f"{words} of shape {shape} in each sample" if shape else words


def _text_field(shape: tuple[int, ...]) -> Field:
    return Field("object", unit=f"{'list<' * len(shape)}string{'>' * len(shape)}") if shape else Field("text")


def _variable(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Field, np.dtype[Any]] | None:
    """Return the field of values of variable length, and the type of an element; None for another type."""
    h5py = need("h5py", "hdf5")
    if h5py.check_string_dtype(dtype) is not None:
        return _text_field(shape), np.dtype(np.uint8)
    inner = h5py.check_vlen_dtype(dtype)
    if inner is None or shape:
        return None
    inner = np.dtype(inner)
    if inner.shape or inner.newbyteorder("=").name not in DTYPES:
        return None
    if inner == np.uint8:
        return Field("bytes"), inner
    return Field("array", inner.newbyteorder("=").name, (None,)), inner


def _is_on_heap(dataset: Any) -> bool:
    """Whether our own `Heap` can read the values: addresses of 8 bytes, elements as NumPy has them."""
    h5py = need("h5py", "hdf5")
    if dataset.file.id.get_create_plist().get_sizes() != (8, 8):
        return False
    if h5py.check_string_dtype(dataset.dtype) is not None:
        return True
    inner = h5py.check_vlen_dtype(dataset.dtype)
    return bool(h5py.h5t.py_create(np.dtype(inner), logical=True) == dataset.id.get_type().get_super())


def _ragged(group: Any, file: ProbedFile, name: str) -> Column:
    where = f"{file.path}: group {group.name!r}"
    shape = np.asarray(_attributes(group, file, RAGGED).get(RAGGED, ()))
    try:
        values, offsets, shapes = (
            read_layout(group[part], file, f"{name}/{part}") for part in ("values", "offsets", "shapes")
        )
    except (KeyError, AttributeError) as error:
        raise SourceError(f"{where} is no group of ragged arrays: {error}") from error
    return ragged_column(where, file.path, (values, offsets, shapes), open_rows, np.atleast_1d(shape).tolist())
