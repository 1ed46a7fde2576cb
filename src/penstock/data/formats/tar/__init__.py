"""Tar shards as WebDataset has them: files that share a name up to the first dot are one sample."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.tar import fields, source

    return Implementation(
        open_files=source.open_files,
        writer=source.TarWriter,
        why_unsupported=fields.why_unsupported,
    )


TAR = Format(name="tar", suffixes=(".tar", ".tar.gz", ".tgz"), load=_load)
