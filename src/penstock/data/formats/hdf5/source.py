"""HDF5: the datasets of a file are the fields of its samples, and their rows are the samples.

fields      the datasets of the file, or of a group, which all have the same number of rows; "group/name" for those
            that lie deeper. A soft link is a name like any other. What each type is to a sample: `fields.py`. What
            `HDF5Writer` writes: `writer.py`
files       several are read one after another, and have to have the same fields
reading     past the HDF5 library and its lock where the file allows it, so that threads and processes read at once:
            `layout.py`; by the library otherwise. Handles are opened in the process that reads
chunk_starts   those of the largest field, if its chunks have to be unpacked
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from penstock.core.errors import SourceError
from penstock.data.formats.column_source import ColumnSource, FileColumns
from penstock.data.formats.hdf5.fields import read_columns
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.layout import ProbedFile
from penstock.data.formats.hdf5.select import select_columns
from penstock.data.optional import need
from penstock.data.rows import translate_errors
from penstock.data.schema import Errors, Selection
from penstock.data.storage.storage import Storage

_OLDER = {
    b"CDF": "netCDF-3, and no HDF5 as netCDF-4 is; write it anew: nccopy -k nc4 old.nc new.nc",
    b"\x0e\x03\x13": "HDF4, and no HDF5; write it anew: h4toh5 old.hdf new.h5",
}
"""By a file's first bytes."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    group: str = "/",
    external: bool = False,
    binary: Sequence[str] = (),
    max_record_nbytes: int = 1 << 30,
    chunk_cache_nbytes: int = 256 << 20,
) -> ColumnSource:
    """Open HDF5 files.

    Args:
        paths: of the files.
        storage: where they lie.
        fields: which datasets; by default all, which then need the same number of rows.
        errors: unused: reading a broken sample raises RecordError.
        group: whose datasets are the fields.
        external: whether the files are trusted. Then values may lie in other files (external links, external storage,
            virtual datasets), of which a file can name any that this process can read; and the HDF5 library reads
            values of variable length that penstock cannot: in parts of compounds and attributes, or packed by other
            filters than gzip. It takes whatever memory the file states for one.
        binary: fields of strings, or lists of these, that are given as bytes, without NULs at the end: text in other
            encodings than UTF-8, or images. By their names in the file.
        max_record_nbytes: larger rows and chunks are refused.
        chunk_cache_nbytes: the most that unpacked chunks of one field take, in each process.

    Raises:
        SourceError: a file is no HDF5 file, is broken, or its datasets cannot be fields; their values lie in other
            files, without `external`; or `binary` names other than fields of strings.
        ExtraError: h5py is not installed.
    """
    probe = partial(_probe_file, fields, group, max_record_nbytes, external, frozenset(binary))
    return ColumnSource([probe(storage.local(path)) for path in paths], HDF5File, chunk_cache_nbytes)


def _probe_file(
    fields: Selection, group: str, max_nbytes: int, external: bool, binary: frozenset[str], path: str
) -> FileColumns:
    h5py = need("h5py", "hdf5")
    with translate_errors(f"{path} cannot be read as HDF5"):
        nbytes = os.stat(path).st_size
        _refuse_older(path)
        with h5py.File(path, "r") as file:
            if not isinstance(file.get(group), h5py.Group):
                raise SourceError(f"{path} has no group {group!r}")
            probed = ProbedFile(
                path=path, nbytes=nbytes, group=group, max_nbytes=max_nbytes, external=external, binary=binary
            )
            columns = select_columns(file[group], fields, partial(read_columns, file=probed), external=external)
    own = columns.keys() if fields.chosen is None else {name for _, name in fields.chosen}
    if binary - own:
        raise SourceError(f"{path}: binary= names {sorted(binary - own)}, and the fields are {sorted(own)}")
    return FileColumns(path=path, nbytes=nbytes, columns=columns)


def _refuse_older(path: str) -> None:
    """Raise SourceError if a file is of a format that HDF5 took the place of."""
    with open(path, "rb") as file:
        words = _OLDER.get(file.read(3))
    if words:
        raise SourceError(f"{path} is {words}")
