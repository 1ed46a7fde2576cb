"""Where the rows of an HDF5 dataset lie in its file, so that they can be read without the HDF5 library.

    in place   contiguous, or in chunks of whole rows that no filter has packed: a row is a range of bytes in a map
    packed     in chunks that deflate and shuffle have packed, or that hold parts of rows
    library    the rest: other filters, compact datasets, types that the library has to convert, files with a user
               block; and what lies in other files, if that is allowed

All is read once, when a source is opened; worker processes need the HDF5 library for the last kind only.
"""

from __future__ import annotations

import math
import os
import posixpath
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.hdf5.heap import HEAP_REFERENCE, UNWRITTEN
from penstock.data.optional import need

Access = Literal["contiguous", "chunks", "library"]
"""What reads the rows: a range of bytes, chunks that are unpacked here, or the HDF5 library."""

Filter = tuple[Literal["deflate", "shuffle"], int]
"""What packed a chunk, and the bytes of an element (which only shuffle asks for)."""

_DEFLATE, _SHUFFLE = 1, 2
_PIPELINES: list[list[str]] = [[], ["deflate"], ["shuffle"], ["shuffle", "deflate"]]
_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = 0, 1, 2, 3
_MAX_ROWS = 1 << 48


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTable:
    """The chunks of a dataset, in the order of their numbers in its grid."""

    numbers: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    skipped: np.ndarray
    """Bit i is set where filter i was left out."""

    def find(self, number: int) -> tuple[int, int, int] | None:
        """Return a chunk's offset, size and skipped filters; None if it was never written."""
        at = int(np.searchsorted(self.numbers, number))
        if at == len(self.numbers) or self.numbers[at] != number:
            return None
        return int(self.offsets[at]), int(self.sizes[at]), int(self.skipped[at])


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetLayout:
    """Where the rows of one dataset lie. Can be pickled."""

    name: str
    """Its path in the file."""

    count: int
    shape: tuple[int, ...]
    """Of a row."""

    dtype: np.dtype[Any]
    """As the elements lie in the file."""

    access: Access = "library"

    offset: int = 0
    """Of the first row, if contiguous."""

    chunk: tuple[int, ...] = ()
    """Its shape, if there are chunks."""

    filters: tuple[Filter, ...] = ()
    fill: bytes = b""
    """One element of a chunk that was never written."""

    chunks: ChunkTable | None = field(default=None, repr=False)

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row; those of the reference, where its length varies."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows_per_chunk(self) -> int:
        """How many rows are read together; 1 without chunks."""
        return self.chunk[0] if self.chunk else 1

    @property
    def grid(self) -> tuple[int, ...]:
        """How many chunks there are along each dimension."""
        return tuple(-(-size // part) for size, part in zip((self.count, *self.shape), self.chunk, strict=True))

    @property
    def is_in_place(self) -> bool:
        """Whether rows are ranges of the file."""
        if self.access == "chunks":
            return not self.filters and self.chunk[1:] == self.shape
        return self.access == "contiguous"


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


def read_layout(dataset: Any, file: ProbedFile, name: str, *, on_heap: bool = False) -> DatasetLayout:
    """Return where a dataset's rows lie.

    Args:
        dataset: h5py's.
        file: from which it was reached.
        name: its path in the group.
        on_heap: whether its elements are references to the global heap.

    Raises:
        SourceError: it is too large, lies beyond the end of the file, or in another file.
    """
    access = _access(dataset, file, on_heap)
    layout = _library_layout(dataset, access)
    if dataset.file.filename != file.path:
        layout = replace(layout, name=posixpath.join("/", file.group, name))
    _check_sizes(layout, file.path, file.max_nbytes)
    is_chunk_too_large = layout.rows_per_chunk * layout.row_nbytes > file.max_nbytes
    if access == "library" or is_chunk_too_large:
        # The size in memory of objects is unknown before they are read, so they are read row by row.
        return replace(layout, chunk=()) if is_chunk_too_large or layout.dtype.hasobject else layout
    if 0 in (layout.count, *layout.shape):
        return layout
    stored = replace(layout, dtype=HEAP_REFERENCE) if on_heap else layout
    if access == "contiguous":
        offset = int(dataset.id.get_offset())
        if offset + stored.count * stored.row_nbytes > file.nbytes:
            raise SourceError(f"{file.path}: dataset {layout.name!r} ends behind the end of the file")
        return replace(stored, access="contiguous", offset=offset)
    return _chunked_layout(stored, dataset, file.nbytes) or layout


def _library_layout(dataset: Any, access: Access) -> DatasetLayout:
    """Return the layout of a dataset that the HDF5 library reads."""
    inner = dataset.dtype.subdtype
    base, parts = inner if inner is not None else (dataset.dtype, ())
    shape: tuple[int, ...] = (*dataset.shape, *parts)
    chunk: tuple[int, ...] = (*dataset.chunks, *parts) if dataset.chunks is not None else ()
    if access == "library" and dataset.id.get_create_plist().get_layout() == _COMPACT:
        chunk = (max(1, shape[0]), *shape[1:])  # a compact dataset has 64 KiB at most
    return DatasetLayout(name=dataset.name, count=shape[0], shape=shape[1:], dtype=np.dtype(base), chunk=chunk)


def _check_sizes(layout: DatasetLayout, path: str, max_nbytes: int) -> None:
    chunk_nbytes = math.prod(layout.chunk) * layout.dtype.itemsize
    if max(layout.row_nbytes, chunk_nbytes) > max_nbytes or layout.count > _MAX_ROWS:
        raise SourceError(
            f"{path}: dataset {layout.name!r} has {layout.count} rows of {layout.row_nbytes} bytes, in chunks of "
            f"{chunk_nbytes}; {max_nbytes} are the most; raise max_record_nbytes if that is right"
        )


def _chunked_layout(layout: DatasetLayout, dataset: Any, nbytes: int) -> DatasetLayout | None:
    """Return the layout with its chunks; None if only the library can read them."""
    chunks, filters = _chunk_table(dataset, layout.grid, nbytes), _filters(dataset)
    if chunks is None or filters is None:
        return None
    fill = bytes(layout.dtype.itemsize)
    if len(chunks.numbers) < math.prod(layout.grid):
        # Only asked for where it is needed: HDF5 2.0.0 crashes on a corrupt fill value.
        h5py = need("h5py", "hdf5")
        if layout.dtype != HEAP_REFERENCE:
            fill = np.asarray(dataset.fillvalue, layout.dtype).tobytes()
        elif dataset.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED:
            if h5py.check_string_dtype(dataset.dtype) is None:
                return None
            fill = UNWRITTEN
    return replace(layout, access="chunks", filters=filters, fill=fill, chunks=chunks)


def _access(dataset: Any, file: ProbedFile, on_heap: bool) -> Access:
    h5py = need("h5py", "hdf5")
    created = dataset.id.get_create_plist()
    of_file = dataset.file.id.get_create_plist()
    other = _other_file(dataset, file.path)
    if other and not file.external:
        raise SourceError(
            f"{file.path}: the values of dataset {dataset.name!r} lie in {other}; pass external=True if this file may "
            "name files to read, choose other fields with fields=, or open that file"
        )
    if other:
        return "library"
    as_numpy_has_it = on_heap or h5py.h5t.py_create(dataset.dtype, logical=True) == dataset.id.get_type()
    if not as_numpy_has_it or (dataset.dtype.hasobject and not on_heap) or of_file.get_userblock():
        return "library"
    if created.get_layout() == _CONTIGUOUS:
        return "contiguous" if dataset.id.get_offset() is not None else "library"
    if created.get_layout() == _CHUNKED and _filters(dataset) is not None and hasattr(dataset.id, "chunk_iter"):
        return "chunks"
    return "library"


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


def _filters(dataset: Any) -> tuple[Filter, ...] | None:
    """Return the filters in the order in which they packed; None if there are others than deflate and shuffle."""
    created = dataset.id.get_create_plist()
    found: list[Filter] = []
    for number in range(created.get_nfilters()):
        code, _, options, _ = created.get_filter(number)
        if code == _DEFLATE:
            found.append(("deflate", 1))
        elif code == _SHUFFLE and options and options[0] > 0:
            found.append(("shuffle", int(options[0])))
        else:
            return None
    return tuple(found) if [name for name, _ in found] in _PIPELINES else None


def _chunk_table(dataset: Any, grid: tuple[int, ...], nbytes: int) -> ChunkTable | None:
    """Return the chunks; None if there would be more of them than the file has bytes."""
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
    columns = np.array(sorted(found), np.int64).reshape(-1, 4).T
    return ChunkTable(numbers=columns[0], offsets=columns[1], sizes=columns[2], skipped=columns[3])
