"""Zarr groups, versions 2 and 3: the arrays of a group are the fields of its samples."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.zarr import source, writer

    return Implementation(
        open_files=source.open_files, writer=writer.ZarrWriter, why_unsupported=writer.why_unsupported
    )


ZARR = Format(
    name="zarr",
    suffixes=(".zarr",),
    load=_load,
    folder_markers=("zarr.json", ".zgroup", ".zarray"),
    writes_folders=True,
)
