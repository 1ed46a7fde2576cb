"""HDF5: the datasets of a file are the fields of its samples, and their rows are the samples.

fields      the datasets of the file, or of a group, that have as many rows as the largest one; "group/name" for those
            that lie deeper. What each type is to a sample: `fields.py`. What `HDF5Writer` writes: `writer.py`
files       several are read one after another, and have to have the same fields
reading     past the HDF5 library and its lock where the file allows it, so that threads and processes read at once:
            `layout.py`; by the library otherwise. Handles are opened in the process that reads
chunk_starts   those of the largest field, if its chunks have to be unpacked
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.concat_index import ConcatIndex
from penstock.data.formats.hdf5.fields import Column, Values, read_columns
from penstock.data.formats.hdf5.file import LIBRARY_ERRORS, HDF5File
from penstock.data.formats.hdf5.heap import Heap, HeapCollection
from penstock.data.formats.hdf5.layout import ProbedFile
from penstock.data.formats.hdf5.rows import open_rows
from penstock.data.formats.hdf5.select import select_columns
from penstock.data.optional import need
from penstock.data.sample_batch import put_in_order, samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection
from penstock.data.source import Source
from penstock.data.storage.storage import Storage

_MAX_RUNS = 1 << 24
_COLLECTION_NBYTES = 4096
_COLLECTIONS_NBYTES = 16 << 20


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    group: str = "/",
    external: bool = False,
    max_record_nbytes: int = 1 << 30,
    chunk_cache_nbytes: int = 256 << 20,
) -> HDF5Source:
    """Open HDF5 files.

    Args:
        paths: of the files.
        storage: where they lie.
        fields: which datasets; by default all that have as many rows as the largest one.
        errors: unused: reading a broken sample raises RecordError.
        group: whose datasets are the fields.
        external: whether values may lie in other files: external links, external storage, virtual datasets. A file can
            name any file that this process can read, so only for files from somebody trusted.
        max_record_nbytes: larger rows and chunks are refused.
        chunk_cache_nbytes: the most that unpacked chunks of one field take, in each process.

    Raises:
        SourceError: a file is no HDF5 file, is broken, or its datasets cannot be fields; or their values lie in other
            files, without `external`.
        ExtraError: h5py is not installed.

    Example:
        >>> import tempfile
        >>> import h5py
        >>> fields = Selection.of({"x": "image", "y": "label"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with h5py.File(f"{folder}/train.h5", "w") as file:
        ...         file["image"] = np.zeros((10, 28, 28), np.uint8)
        ...         file["label"] = np.arange(10)
        ...     source = open_files([f"{folder}/train.h5"], storage=Storage(), fields=fields, errors="raise")
        ...     x, y = source[7].values()
        ...     source.close()
        >>> x.shape, y
        ((28, 28), np.int64(7))
    """
    found = [_probe_file(storage.local(path), fields, group, max_record_nbytes, external) for path in paths]
    return HDF5Source(found, max_record_nbytes, chunk_cache_nbytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class FileInfo:
    """The columns of one file. Can be pickled."""

    path: str
    nbytes: int
    columns: dict[str, Column]
    """By the names that samples have."""

    @property
    def schema(self) -> Schema:
        """The fields."""
        return {name: column.field for name, column in self.columns.items()}

    @property
    def count(self) -> int:
        """How many samples there are."""
        return next((column.count for column in self.columns.values()), 0)


class HDF5Source(Source):
    """Samples of HDF5 files, by number.

    Args:
        files: their columns.
        max_record_nbytes: larger heap collections are refused.
        chunk_cache_nbytes: the most that unpacked chunks of one field take.

    Raises:
        SourceError: the files have different fields.
    """

    def __init__(self, files: Sequence[FileInfo], max_record_nbytes: int, chunk_cache_nbytes: int) -> None:
        self.where = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
        self._files = list(files)
        self._schema = _common(self._files)
        self._limits = (max_record_nbytes, chunk_cache_nbytes)
        self._parts = ConcatIndex(file.count for file in files)
        self._reading = PerProcess(partial(_OpenFiles, self._files, *self._limits), _OpenFiles.close)

    def __len__(self) -> int:
        return len(self._parts)

    def read(self, index: int) -> Sample:
        """Return a sample.

        Raises:
            RecordError: it is broken.
        """
        number, own = self._parts.locate(index)
        readers = self._reading.get().readers(number)
        return {name: readers[name].value(own) for name in self._schema}

    @property
    def reads_batches(self) -> bool:  # type: ignore[override]
        """Whether all fields are small, and no library reads them."""
        return all(file.columns[name].is_small for file in self._files for name in self._schema)

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, field by field."""
        found = []
        for number, places, own in self._parts.split(indices):
            readers = self._reading.get().readers(number)
            found.append((places, samples_of([*self._schema], [readers[name].take(own) for name in self._schema])))
        return put_in_order(found, len(indices))

    @property
    def schema(self) -> Schema:
        """The fields of every sample."""
        return dict(self._schema)

    @property
    def chunk_starts(self) -> np.ndarray | None:
        """Where the chunks of the largest field begin; None where nothing has to be unpacked."""
        name = max(self._schema, key=lambda name: max(file.columns[name].nbytes for file in self._files))
        columns = [file.columns[name] for file in self._files]
        if all(not column.chunk_nbytes or column.layout.rows_per_chunk == 1 for column in columns):
            return None
        if sum(column.layout.count // column.layout.rows_per_chunk for column in columns) > _MAX_RUNS:
            return None
        starts = [np.zeros(0, np.int64)]
        for number, column in enumerate(columns):
            starts.append(self._parts.starts[number] + self._starts(number, name, column))
        return np.append(np.concatenate(starts), len(self))

    def _starts(self, number: int, name: str, column: Column) -> np.ndarray:
        chunks = np.arange(0, column.layout.count, column.layout.rows_per_chunk)
        if column.offsets is None:
            return chunks
        cuts = np.searchsorted(self._reading.get().offsets(number, name), chunks)
        return np.unique(np.append(0, cuts[cuts < column.count])) if column.count else cuts[:0]

    def select_fields(self, fields: Sequence[str]) -> HDF5Source:
        """Return a source with these fields only; the others' bytes are not read. Both close together."""
        narrow = copy.copy(self)
        narrow._schema = {name: self._schema[name] for name in fields}
        return narrow

    def close(self) -> None:
        """Close this process's files; they are opened again when they are needed."""
        self._reading.close()


def _common(files: Sequence[FileInfo]) -> Schema:
    common = files[0].schema
    for file in files[1:]:
        words = {name: field.words() for name, field in file.schema.items()}
        if file.schema.keys() != common.keys():
            raise SourceError(f"{file.path} has the fields {words}, and {files[0].path} has {sorted(common)}")
        for name, field in file.schema.items():
            old = common[name]
            if replace(old, shape=()) != replace(field, shape=()) or len(old.shape) != len(field.shape):
                raise SourceError(
                    f"field {name!r} of {file.path} is {field.words()}, and that of {files[0].path} {old.words()}; "
                    "files that are opened together need the same"
                )
            sizes = (one if one == other else None for one, other in zip(old.shape, field.shape, strict=True))
            common[name] = replace(old, shape=tuple(sizes))
    return common


class _OpenFiles:
    """The files as one process has them open."""

    def __init__(self, files: list[FileInfo], max_record_nbytes: int, chunk_cache_nbytes: int) -> None:
        self._files = [HDF5File(file.path, file.nbytes) for file in files]
        self._columns = [file.columns for file in files]
        self._max_record_nbytes = max_record_nbytes
        datasets = {name: column.layout.name for name, column in files[0].columns.items()}
        caches: dict[str, ChunkCache[np.ndarray]] = {
            dataset: ChunkCache(max(file.columns[name].chunk_nbytes for file in files), chunk_cache_nbytes)
            for name, dataset in datasets.items()
        }
        self._chunks = {name: caches[dataset] for name, dataset in datasets.items()}  # one for all parts of a compound
        self._collections: ChunkCache[HeapCollection] = ChunkCache(_COLLECTION_NBYTES, _COLLECTIONS_NBYTES)
        self._lock = threading.Lock()
        self._readers: dict[int, dict[str, Values]] = {}

    def readers(self, number: int) -> dict[str, Values]:
        """Return what reads the fields of file `number`."""
        found = self._readers.get(number)
        if found is None:
            with self._lock:
                file, columns = self._files[number], self._columns[number]
                heap = Heap(file, self._collections, self._max_record_nbytes)
                found = {name: column.reader(file, self._chunks[name], heap) for name, column in columns.items()}
                self._readers[number] = found
        return found

    def offsets(self, number: int, name: str) -> np.ndarray:
        """Return where each ragged array of a field begins."""
        layout = self._columns[number][name].offsets
        if layout is None:
            raise TypeError(f"{name} is not ragged")
        return open_rows(layout, self._files[number], self._chunks[name]).span(0, layout.count)

    def close(self) -> None:
        self._readers.clear()
        for file in self._files:
            file.close()


def _probe_file(path: str, fields: Selection, group: str, max_nbytes: int, external: bool) -> FileInfo:
    h5py = need("h5py", "hdf5")
    try:
        nbytes = os.stat(path).st_size
        with h5py.File(path, "r") as file:
            if not isinstance(file.get(group), h5py.Group):
                raise SourceError(f"{path} has no group {group!r}")
            probed = ProbedFile(path=path, nbytes=nbytes, group=group, max_nbytes=max_nbytes, external=external)
            columns = select_columns(file[group], fields, partial(read_columns, file=probed), external=external)
    except SourceError:
        raise
    except LIBRARY_ERRORS as error:
        raise SourceError(f"{path} cannot be read as HDF5: {error}") from error
    return FileInfo(path=path, nbytes=nbytes, columns=columns)
