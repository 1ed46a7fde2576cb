"""Audio files, whole or as clips of one length. Audio is read only."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.audio import source

    return Implementation(open_files=source.open_files)


AUDIO = Format(
    name="audio",
    suffixes=(".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif"),
    load=_load,
    reads_folder_trees=True,
)
