"""Images in folders, one folder for each class."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.images import source

    return Implementation(
        open_files=source.open_files,
        writer=source.ImageFolderWriter,
        why_unsupported=source.why_unsupported,
    )


IMAGES = Format(
    name="images",
    suffixes=(".jpg", ".jpeg", ".png", ".webp"),
    load=_load,
    reads_folder_trees=True,
    writes_folders=True,
)
