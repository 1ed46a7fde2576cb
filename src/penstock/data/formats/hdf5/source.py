"""HDF5: the datasets of a file are the fields of its samples, and their rows are the samples.

fields      the datasets of the file, or of a group, that have as many rows as the largest one; "group/name" for those
            that lie deeper. A soft link is a name like any other. What each type is to a sample: `fields.py`. What
            `HDF5Writer` writes: `writer.py`
files       several are read one after another, and have to have the same fields
reading     past the HDF5 library and its lock where the file allows it, so that threads and processes read at once:
            `layout.py`; by the library otherwise. Handles are opened in the process that reads
chunk_starts   those of the largest field, if its chunks have to be unpacked
"""

from __future__ import annotations

import os
from functools import partial

from penstock.core.errors import SourceError
from penstock.data.formats.array_columns import translate_errors
from penstock.data.formats.column_source import ColumnSource, FileColumns
from penstock.data.formats.hdf5.fields import read_columns
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.layout import ProbedFile
from penstock.data.formats.hdf5.select import select_columns
from penstock.data.optional import need
from penstock.data.schema import Errors, Selection
from penstock.data.storage.storage import Storage


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
) -> ColumnSource:
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
    """
    found = [_probe_file(storage.local(path), fields, group, max_record_nbytes, external) for path in paths]
    return ColumnSource(found, HDF5File, chunk_cache_nbytes)


def _probe_file(path: str, fields: Selection, group: str, max_nbytes: int, external: bool) -> FileColumns:
    h5py = need("h5py", "hdf5")
    with translate_errors(f"{path} cannot be read as HDF5"):
        nbytes = os.stat(path).st_size
        with h5py.File(path, "r") as file:
            if not isinstance(file.get(group), h5py.Group):
                raise SourceError(f"{path} has no group {group!r}")
            probed = ProbedFile(path=path, nbytes=nbytes, group=group, max_nbytes=max_nbytes, external=external)
            columns = select_columns(file[group], fields, partial(read_columns, file=probed), external=external)
    return FileColumns(path=path, nbytes=nbytes, columns=columns)
