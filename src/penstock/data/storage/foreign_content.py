"""Recognises, by a file's first bytes, what none of the formats that are read in order can begin with."""

from __future__ import annotations

_SIGNATURES = (
    (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS, not the data; fetch them: git lfs pull"),
    (b"\xfd7zXZ\0", "is packed by xz; unpack it, or pack it by gzip"),
    *((b"BZh%d1AY&SY" % level, "is packed by bzip2; unpack it, or pack it by gzip") for level in range(1, 10)),
)


def foreign_content(head: bytes) -> str:
    """Return what a file is that begins so, and what to do; "" if it may be data.

    >>> foreign_content(b"a,b"), foreign_content(b"BZh91AY&SY...")
    ('', 'is packed by bzip2; unpack it, or pack it by gzip')
    """
    return next((words for signature, words in _SIGNATURES if head.startswith(signature)), "")
