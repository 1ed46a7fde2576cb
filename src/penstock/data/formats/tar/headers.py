r"""The headers of tar archives: ustar's, with the longer names and sizes of pax and of GNU tar.

An archive is blocks of 512 bytes. A member is a header and its data, filled up with zeros to whole blocks; two blocks
of zeros are the end. Archives that were put together (cat a.tar b.tar) have more members behind it, which are read, as
with tar's --ignore-zeros. A header holds, as text that ends in NUL or a space, numbers in octal:

    0 name (100)   100 mode (8)   108 uid (8)   116 gid (8)   124 size (12)   136 mtime (12)   148 checksum (8)
    156 type (1)   157 linkname (100)   257 magic (6) "ustar\0"   263 version (2)   345 prefix of the name (155)

The checksum is the sum of the header's bytes with spaces in its own place. A size whose first bit is set is binary.
What comes before a member and changes it: type "L" has a longer name as its data (GNU), type "x" has records
"LENGTH KEY=VALUE\n" (pax) of which `path` and `size` matter here; type "g" has such records for all that follow, of
which only `comment` is used. https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.errors import RecordError
from penstock.data.storage.sequential_reader import SequentialReader

BLOCK_NBYTES = 512
END = bytes(2 * BLOCK_NBYTES)
"""Comes after the last member."""

NAME_NBYTES = 100
"""The longest name that needs no pax record."""

_ZEROS = bytes(BLOCK_NBYTES)
_MOST_META_NBYTES = 1 << 20
"""Of a long name, or of pax records."""
_REGULAR = b"0\x007"
_WITHOUT_DATA = b"123456"
_LINKS = b"12"
_RECORD = re.compile(rb"(\d{1,7}) ")


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in an archive, or a link."""

    name: str
    nbytes: int
    offset: int
    """Where its header lies."""
    link: str = ""
    """Of a link, which has no data: what it leads to."""


def members(pieces: SequentialReader) -> Iterator[Member | str | None]:
    """Yield the regular files and links of an archive, in their order; folders and devices are left out.

    Text is a comment on all that follows. None is the end of an archive: of the last one in the file, or of one which
    another one follows.

    When it has yielded a member, the next bytes of `pieces` are its data: take them, or do not.

    Raises:
        RecordError: the archive is truncated, a header is corrupt, or a member is sparse.
    """
    longer: dict[str, str] = {}
    offset = 0  # of the member's first header; the others only change it
    while True:
        block = _block(pieces, offset)
        if block == _ZEROS:
            yield None
            offset, block = _after_zeros(pieces)
            if not block:
                return
            longer = {}
        name, nbytes, kind = _read(pieces.path, block, offset, longer)
        begin = pieces.offset
        there = None if pieces.total is None else pieces.total - begin
        if there is not None and nbytes > there:
            raise RecordError(pieces.path, offset, name, f"it has {nbytes} bytes, and the file {there} more")
        if kind in b"xXgLK":
            records = _meta(pieces, offset, name, nbytes, kind)
            if kind != b"g":
                longer |= records
            elif "comment" in records:
                yield records["comment"]
        else:
            longer = {}
            if kind in _REGULAR and not name.endswith("/"):
                yield Member(name, nbytes, offset)
            elif kind in _LINKS:
                yield Member(name, 0, offset, _text(block[157:257]))
        rest = begin + nbytes + -nbytes % BLOCK_NBYTES - pieces.offset
        if pieces.skip(rest) < rest:
            raise RecordError(pieces.path, offset, name, f"the file ends in the middle of its {nbytes} bytes")
        if kind not in b"xXLK":
            offset = pieces.offset


def _block(pieces: SequentialReader, offset: int) -> bytes:
    block = pieces.take(BLOCK_NBYTES)
    if len(block) < BLOCK_NBYTES:
        reason = "the file ends without an archive's end marker, two blocks of zeros; it is truncated"
        raise RecordError(pieces.path, offset, pieces.key, reason)
    return block


def _after_zeros(pieces: SequentialReader) -> tuple[int, bytes]:
    """Return what follows an archive's end, and where: a block that is not zeros, or nothing."""
    offset, block = pieces.offset, _ZEROS
    while block == _ZEROS:
        offset, block = pieces.offset, pieces.take(BLOCK_NBYTES)
    return offset, block if block.strip(b"\0") else b""


def _read(path: str, block: bytes, offset: int, longer: dict[str, str]) -> tuple[str, int, bytes]:
    """Return a member's name, the bytes of its data, and its type."""
    name = _text(block[:100])
    kind = block[156:157]
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    if len(block) < BLOCK_NBYTES or _number(block[148:156]) != _sum(block):
        raise RecordError(path, offset, name[:100], "the checksum of its header is wrong, and so the rest is lost")
    nbytes = _number(block[124:136])
    if kind not in b"xXgLK":
        name = longer.get("path", name)
        size = longer.get("size")
        if size is not None:
            nbytes = int(size) if size.isdecimal() and len(size) < 20 else None
        if kind == b"S" or any(key.startswith("GNU.sparse.") for key in longer):
            raise RecordError(path, offset, name[:100], "it is sparse; make the archive without --sparse")
        if kind in _WITHOUT_DATA:
            nbytes = 0
    if nbytes is None:
        raise RecordError(path, offset, name[:100], "its size is no number, or a negative one")
    return name, nbytes, kind


def _meta(pieces: SequentialReader, offset: int, name: str, nbytes: int, kind: bytes) -> dict[str, str]:
    """Return the records of a header that is about another header."""
    if nbytes > _MOST_META_NBYTES:
        reason = f"its header has {nbytes} bytes of records; {_MOST_META_NBYTES} are the most"
        raise RecordError(pieces.path, offset, name[:100], reason)
    data = pieces.take(nbytes)
    if len(data) < nbytes:
        raise RecordError(pieces.path, offset, name[:100], f"the file ends in the middle of its {nbytes} bytes")
    if kind == b"K":
        return {}
    if kind == b"L":
        return {"path": _text(data)}
    found, at = {}, 0
    while at < len(data) and data[at]:
        length = _RECORD.match(data, at)
        end = at + int(length[1]) if length else at
        if length is None or not length.end() < end <= len(data):
            raise RecordError(pieces.path, offset, name[:100], f"its pax header has no record at byte {at}")
        key, _, value = data[length.end() : end].removesuffix(b"\n").partition(b"=")
        if key in (b"path", b"size", b"comment") or key.startswith(b"GNU.sparse."):
            found[key.decode("latin-1")] = value.decode("utf-8", "backslashreplace")
        at = end
    return found


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _number(field: bytes) -> int | None:
    """Return a number in octal, or a binary one; None where it is neither, or negative."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.partition(b"\0")[0].strip()
    try:
        return int(digits, 8) if digits.isdigit() else None if digits else 0
    except ValueError:
        return None


def _sum(block: bytes) -> int:
    """Return the sum of a header's bytes, with spaces in the place of its checksum.

    The lower half of Adler-32 is 1 and the sum of the bytes, modulo 65521, which 256 bytes do not reach: the fastest
    sum of bytes in the standard library.
    """
    halves = (zlib.adler32(block[:256]) & 0xFFFF) + (zlib.adler32(block[256:]) & 0xFFFF) - 2
    return halves - sum(block[148:156]) + 8 * 0x20


def header(name: str, nbytes: int) -> bytes:
    """Return the header of a regular file, with no owner and of 1970: equal archives have equal bytes.

    >>> len(header("a.txt", 5)), len(header("a" * 200, 5))
    (512, 1536)
    """
    encoded = name.encode()
    if len(encoded) > NAME_NBYTES:
        member = tarfile.TarInfo(name)
        member.size = nbytes
        return member.tobuf(tarfile.PAX_FORMAT)
    size = b"%011o\0" % nbytes if nbytes < 8**11 else b"\x80" + nbytes.to_bytes(11, "big")
    numbers = b"0000644\0" + b"0000000\0" * 2 + size + b"%011o\0" % 0
    rest = b"0" + bytes(100) + b"ustar\x0000" + bytes(BLOCK_NBYTES - 265)
    before = encoded.ljust(NAME_NBYTES, b"\0") + numbers
    return before + b"%06o\0 " % (sum(before) + 8 * 0x20 + sum(rest)) + rest


def note(text: str) -> bytes:
    """Return a header with a comment on all that follows.

    >>> len(note("made by hand")) % BLOCK_NBYTES
    0
    """
    return tarfile.TarInfo.create_pax_global_header({"comment": text})
