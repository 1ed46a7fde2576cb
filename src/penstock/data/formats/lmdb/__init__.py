"""LMDB environments, as files or as folders."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.lmdb import source
    from penstock.data.formats.tfrecord import features

    return Implementation(
        open_files=source.open_files,
        writer=source.LMDBWriter,
        why_unsupported=features.why_unsupported,
    )


LMDB = Format(
    name="lmdb",
    suffixes=(".lmdb", ".mdb"),
    load=_load,
    folder_markers=("data.mdb",),
    files_without_data=("lock.mdb",),
)
