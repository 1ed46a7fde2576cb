"""HDF5 files: the datasets of a file are the fields of its samples."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.hdf5 import source, writer

    return Implementation(
        open_files=source.open_files,
        writer=writer.HDF5Writer,
        why_unsupported=writer.why_unsupported,
    )


HDF5 = Format(name="hdf5", suffixes=(".h5", ".hdf5", ".hdf"), load=_load)
