"""Where the rows of an HDF5 dataset lie in its file, so that they can be read without the HDF5 library.

    in place   contiguous, or in chunks of whole rows that no filter has packed: a row is a range of bytes in a map
    packed     in chunks that deflate and shuffle have packed, or that hold parts of rows
    library    the rest: other filters, compact datasets, types that the library has to convert, files with a user
               block, text with a fill value in chunks of which some were never written; and what lies in other
               files, if that is allowed

All is read once, when a source is opened; worker processes need the HDF5 library for the last kind only.
"""

from __future__ import annotations

import math
import os
import posixpath
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.column_source import ArrayLayout
from penstock.data.formats.hdf5.heap import HEAP_REFERENCE
from penstock.data.optional import need

Filter = tuple[Literal["deflate", "shuffle"], int]
"""What packed a chunk, and the bytes of an element (which only shuffle asks for)."""

_DEFLATE, _SHUFFLE = 1, 2
_CONTIGUOUS, _CHUNKED, _VIRTUAL = 1, 2, 3
_MAX_ROWS = 1 << 48
_PIECE_NBYTES = 8 << 10
"""What the HDF5 library takes beside the values for each chunk that it reads at once: 6.5 kB were seen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetLayout(ArrayLayout):
    """Where the rows of one dataset lie; a contiguous one is one chunk."""

    is_stored: bool = False
    """Whether they are read here, and not by the HDF5 library."""

    chunks: np.ndarray = field(default_factory=partial(np.empty, (4, 0), np.int64), repr=False)
    """Of each chunk that was written: its number in the grid (in this order), offset, size, and which filters it was
    packed without (bit i is filter i)."""

    filters: tuple[Filter, ...] = ()
    fill: Any = 0
    """An element of a chunk that was never written."""

    max_nbytes: int
    """The most that a chunk may unpack to."""

    @property
    def grid(self) -> tuple[int, ...]:
        """How many chunks there are along each dimension."""
        return tuple(-(-size // part) for size, part in zip((self.count, *self.shape), self.chunk, strict=True))

    @property
    def is_in_place(self) -> bool:  # type: ignore[override]
        """Whether rows are ranges of the file."""
        return self.is_stored and not self.filters and self.chunk[1:] == self.shape

    @property
    def is_one_by_one(self) -> bool:  # type: ignore[override]
        """Whether the library reads each row alone."""
        return not self.is_stored and self.chunk[0] == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedFile:
    """The file whose datasets are looked at, and what of it may be read."""

    path: str
    nbytes: int
    group: str
    """Whose datasets are the fields."""

    max_nbytes: int
    """A larger row, or chunk, is refused."""

    external: bool
    """Whether values may lie in other files. A file names them as it likes, also those that nobody meant to share."""

    binary: frozenset[str] = frozenset()
    """Which strings are bytes, and no text."""


def read_layout(dataset: Any, file: ProbedFile, name: str, *, on_heap: bool = False) -> DatasetLayout:
    """Return where a dataset's rows lie; `name` is its path in the group.

    With `on_heap` its elements are references to the global heap.

    Raises:
        SourceError: it is too large, lies beyond the end of the file, or in another file, or one of these is missing.
    """
    other = _other_file(dataset, file.path)
    if other and not file.external:
        raise SourceError(
            f"{file.path}: the values of dataset {dataset.name!r} lie in {other}; pass external=True if this file may "
            "name files to read, choose other fields with fields=, or open that file"
        )
    if missing := _missing_source(dataset):
        raise SourceError(
            f"{file.path}: the virtual dataset {dataset.name!r} has values of {missing!r}, which is not there; put it "
            "where it was, or choose other fields with fields="
        )
    dtype, inner = dataset.dtype.base, dataset.dtype.shape
    count, shape = int(dataset.shape[0]), (*dataset.shape[1:], *inner)
    layout = DatasetLayout(
        name=dataset.name if dataset.file.filename == file.path else posixpath.join("/", file.group, name),
        count=count,
        shape=shape,
        dtype=dtype,
        chunk=(1, *shape) if dataset.chunks is None else (*dataset.chunks, *inner),
        max_nbytes=file.max_nbytes,
    )
    chunk_nbytes = math.prod(layout.chunk) * layout.dtype.itemsize
    if max(layout.row_nbytes, chunk_nbytes) > file.max_nbytes or count > _MAX_ROWS:
        raise SourceError(
            f"{file.path}: dataset {layout.name!r} has {count} rows of {layout.row_nbytes} bytes, in chunks of "
            f"{chunk_nbytes}; {file.max_nbytes} are the most; raise max_record_nbytes if that is right"
        )
    pieces = 1 if dataset.chunks is None else math.prod(layout.grid[1:])
    if pieces * _PIECE_NBYTES > file.max_nbytes:
        raise SourceError(
            f"{file.path}: a row of dataset {layout.name!r} lies in {pieces} chunks, for which the HDF5 library takes "
            f"{pieces * _PIECE_NBYTES} bytes; {file.max_nbytes} are the most; raise max_record_nbytes if that is right"
        )
    is_chunk_too_large = layout.chunk[0] * layout.row_nbytes > file.max_nbytes
    if not (other or is_chunk_too_large or 0 in dataset.shape):
        found = _stored_layout(layout, dataset, file, on_heap)
        if found is not None:
            return found
    # The size in memory of objects is unknown before they are read, so they are read row by row.
    return replace(layout, chunk=(1, *shape)) if is_chunk_too_large or layout.dtype.hasobject else layout


def _stored_layout(layout: DatasetLayout, dataset: Any, file: ProbedFile, on_heap: bool) -> DatasetLayout | None:
    """Return the layout with its chunks; None if only the library can read them."""
    h5py = need("h5py", "hdf5")
    created = dataset.id.get_create_plist()
    is_as_numpy_has_it = on_heap or (
        h5py.h5t.py_create(dataset.dtype, logical=True) == dataset.id.get_type() and not layout.dtype.hasobject
    )
    if not is_as_numpy_has_it or dataset.file.id.get_create_plist().get_userblock():
        return None
    layout = replace(layout, dtype=HEAP_REFERENCE) if on_heap else layout
    if created.get_layout() == _CONTIGUOUS:
        offset, nbytes = dataset.id.get_offset(), layout.count * layout.row_nbytes
        if offset is None:  # nothing was written
            has_fill = created.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
            return None if has_fill or not on_heap else replace(layout, is_stored=True, fill=np.zeros(1, layout.dtype))
        if offset + nbytes > file.nbytes:
            raise SourceError(f"{file.path}: dataset {layout.name!r} ends behind the end of the file")
        chunks = np.array([[0], [offset], [nbytes], [0]])
        return replace(layout, is_stored=True, chunk=(layout.count, *layout.shape), chunks=chunks)
    filters = _filters(created)
    if created.get_layout() != _CHUNKED or filters is None or not hasattr(dataset.id, "chunk_iter"):
        return None
    table = _chunk_table(dataset, layout.grid, file.nbytes)
    if table is None:
        return None
    fill = np.zeros(1, layout.dtype)
    if table.shape[1] < math.prod(layout.grid):
        # Only asked for where it is needed: HDF5 2.0.0 crashes on a corrupt fill value.
        if not on_heap:
            fill = np.asarray(dataset.fillvalue, layout.dtype).reshape(-1)[:1]
        elif created.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED:
            return None
    return replace(layout, is_stored=True, chunks=table, filters=filters, fill=fill)


def _other_file(dataset: Any, path: str) -> str:
    """Return in words in which other files a dataset's values lie; "" if in none.

    A virtual dataset counts as one, also where its sources are in this file: those may lie in others again.
    """
    created = dataset.id.get_create_plist()
    if dataset.file.filename != path:
        return repr(dataset.file.filename)
    if created.get_external_count():
        return f"{os.fsdecode(created.get_external(0)[0])!r} (external storage)"
    if created.get_layout() == _VIRTUAL:
        first = created.get_virtual_filename(0) if created.get_virtual_count() else ""
        return f"{first!r} (a virtual dataset)"
    return ""


def _missing_source(dataset: Any) -> str:
    """Return a file whose values a virtual dataset has and that is not there; HDF5 would give its fill value for them.

    HDF5 looks for it where it is named, and beside the dataset's own file. Names with % stand for as many as there are.
    """
    created = dataset.id.get_create_plist()
    if created.get_layout() != _VIRTUAL or "HDF5_VDS_PREFIX" in os.environ:
        return ""
    folders = {os.path.dirname(one) for one in (dataset.file.filename, os.path.realpath(dataset.file.filename))}
    for name in {created.get_virtual_filename(number) for number in range(created.get_virtual_count())}:
        beside = (os.path.join(folder, one) for folder in folders for one in (name, os.path.basename(name)))
        if name != "." and "%" not in name and not any(map(os.path.exists, (name, *beside))):
            return str(name)
    return ""


def _filters(created: Any) -> tuple[Filter, ...] | None:
    """Return the filters in the order in which they packed; None if there are others than deflate and shuffle."""
    found: list[Filter] = []
    for number in range(created.get_nfilters()):
        code, _, options, _ = created.get_filter(number)
        if code == _DEFLATE:
            found.append(("deflate", 1))
        elif code == _SHUFFLE and options and options[0] > 0:
            found.append(("shuffle", int(options[0])))
        else:
            return None
    return tuple(found)


def _chunk_table(dataset: Any, grid: tuple[int, ...], nbytes: int) -> np.ndarray | None:
    """Return `DatasetLayout.chunks`; None if there would be more of them than the file has bytes."""
    if math.prod(grid) > nbytes:
        return None
    chunk = dataset.chunks
    found: list[tuple[int, int, int, int]] = []
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(chunk))]

    def collect(one: Any) -> bool | None:
        number = sum(at // size * stride for at, size, stride in zip(one.chunk_offset, chunk, strides, strict=True))
        if one.byte_offset is None or max(one.byte_offset, one.size, number) >= 1 << 62:
            return None  # no such chunk; a read of it gives the fill value, as the library does
        found.append((number, one.byte_offset, one.size, one.filter_mask))
        return True if len(found) > nbytes else None

    dataset.id.chunk_iter(collect)
    return np.array(sorted(found), np.int64).reshape(-1, 4).T
