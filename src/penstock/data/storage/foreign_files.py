"""Recognises files that are no data of any format, but stand for them or are packed otherwise, by their first bytes."""

from __future__ import annotations

import os
from contextlib import suppress

from penstock.core.errors import SourceError

GZIP = b"\x1f\x8b\x08"
"""With the one method there is (RFC 1952): a TFRecord whose first record has 35 615 bytes begins with the other two."""
ZSTD = b"\x28\xb5\x2f\xfd"
BZIP2 = tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))

_FOREIGN = {
    b"version https://git-lfs.github.com/spec/v1": "is a pointer of Git LFS, not the data; fetch them: git lfs pull",
    b"\xfd7zXZ\0": "is packed by xz; unpack it, or pack it by gzip",
    ZSTD: "is packed by zstd; unpack it",
    **dict.fromkeys(BZIP2, "is packed by bzip2; unpack it"),
    **{b"PK\3\4%c\0" % version: "is a zip archive; unpack it, or pack it by gzip" for version in (10, 20, 45)},
}
"""What no data begins with, and what a file is that does. A TFRecord's first record would have 4 GiB and more."""

_BEGINNINGS = tuple(_FOREIGN)
_HEAD_NBYTES = 64
_POINTER_NBYTES = 1024
"""More than a pointer of Git LFS has."""


def foreign_words(head: bytes) -> str:
    """Return what a file is that begins with `head`, and what to do; "" if it may be data.

    >>> foreign_words(b"a,b"), foreign_words(b"BZh91AY&SY...")
    ('', 'is packed by bzip2; unpack it')
    """
    if not head.startswith(_BEGINNINGS):
        return ""
    return next(words for beginning, words in _FOREIGN.items() if head.startswith(beginning))


def is_packed(head: bytes) -> bool:
    """Return whether a file that begins with `head` is packed, as `SequentialReader` unpacks it."""
    return head.startswith((GZIP, ZSTD, *BZIP2))


def refuse_foreign(path: str, head: bytes) -> None:
    """Raise SourceError if a file that begins with `head` is no data, but stands for it or is packed otherwise."""
    if words := foreign_words(head):
        raise SourceError(f"{path} {words}")


def refuse_pointer(path: str, local: str) -> None:
    """Raise SourceError if the local file of a path is a pointer of Git LFS; larger ones are not opened, nor pipes."""
    with suppress(OSError):
        if 0 < os.path.getsize(local) < _POINTER_NBYTES:
            with open(local, "rb") as file:
                head = file.read(_HEAD_NBYTES)
                if not is_packed(head):  # some formats unpack it
                    refuse_foreign(path, head)
