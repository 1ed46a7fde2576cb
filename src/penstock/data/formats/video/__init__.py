"""Video files, read as clips of a few frames. Videos are read only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.data.format import Format, Implementation

if TYPE_CHECKING:
    from penstock.data.schema import Schema


def _load() -> Implementation:
    from penstock.data.formats.video import source

    return Implementation(open_files=source.open_files, why_unsupported=_why_unsupported)


def _why_unsupported(schema: Schema) -> str:
    return "videos are read by penstock, and not written"


VIDEO = Format(name="video", suffixes=(".mp4", ".mkv", ".webm", ".mov", ".avi"), load=_load, reads_folder_trees=True)
