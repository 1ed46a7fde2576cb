"""Audio files, whole or as clips of one length. Audio is read only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.data.format import Format, Implementation

if TYPE_CHECKING:
    from penstock.data.schema import Schema


def _load() -> Implementation:
    from penstock.data.formats.audio import source

    return Implementation(open_files=source.open_files, why_unsupported=_why_unsupported)


def _why_unsupported(schema: Schema) -> str:
    return "audio is read by penstock, and not written"


AUDIO = Format(
    name="audio",
    suffixes=(".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif"),
    load=_load,
    reads_folder_trees=True,
)
