"""Video files, read as clips of a few frames. Videos are read only."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.video import source

    return Implementation(open_files=source.open_files)


VIDEO = Format(name="video", suffixes=(".mp4", ".mkv", ".webm", ".mov", ".avi"), load=_load, reads_folder_trees=True)
