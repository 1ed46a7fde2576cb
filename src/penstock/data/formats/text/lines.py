"""Lines of text files, plain or packed, with their places.

    line       ends at a line feed; a carriage return before it is white space of the format above
    offset     of bytes, in what a packed file unpacks to
    blank      a line of white space only; it counts as a line, and is no record

A UTF-8 byte order mark at the beginning is left out. Of a line longer than the limit only the beginning is kept.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from penstock.core.errors import SourceError
from penstock.data.storage.sequential_reader import READ_NBYTES, SequentialReader
from penstock.data.storage.storage import Storage

LONGEST = 32 << 20
"""The default limit for the bytes of a line: of `[],[],` Python's objects take 40 times as much, above 1 GiB."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = b"\xff\xfe", b"\xfe\xff"


@dataclass(frozen=True, slots=True)
class Block:
    """Some lines that follow each other."""

    offset: int
    """Where the first begins."""

    number: int
    """Of the first; a file's first line is 1."""

    lines: list[bytes]
    """With their ends. One that is longer than the limit is alone, and cut one byte behind it."""

    def offsets(self) -> list[int]:
        """Return where each line begins."""
        return list(itertools.accumulate(map(len, self.lines[:-1]), initial=self.offset))


def blocks(storage: Storage, path: str, longest: int) -> Generator[Block, None, None]:
    """Yield all lines of a file.

    Args:
        storage: opens the file.
        path: of a plain or packed file; its first bytes decide which.
        longest: bytes; of a line that has more, one byte more than this is given.

    Raises:
        SourceError: the file cannot be opened, or not be read to its end, or is text in UTF-16.
        RecordError: what was packed is broken; the lines before have been given.
    """
    offset, number = 0, 1
    begun, begun_nbytes = bytearray(), 0  # a line whose end has not come yet
    with closing(SequentialReader(storage, path)) as pieces:
        pieces.key = "line 1"
        while piece := pieces.take(READ_NBYTES):
            lines = io.BytesIO(piece).readlines()
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
            if lines:
                begun += lines[0][: max(0, longest + 1 - len(begun))]
                yield _first(path, offset, number, bytes(begun))
                offset, number = offset + begun_nbytes + len(lines[0]), number + 1
                if len(lines) > 1:
                    yield Block(offset, number, lines[1:])
                    offset, number = offset + len(piece) - len(lines[0]) - len(rest), number + len(lines) - 1
                begun, begun_nbytes = bytearray(), 0
                pieces.key = f"line {number}"
            begun += rest[: max(0, longest + 1 - len(begun))]
            begun_nbytes += len(rest)
    if begun_nbytes:
        yield _first(path, offset, number, bytes(begun))


def _first(path: str, offset: int, number: int, line: bytes) -> Block:
    text = without_mark(path, line) if number == 1 else line
    return Block(offset + len(line) - len(text), number, [text])


def without_mark(path: str, text: bytes) -> bytes:
    """Return the beginning of a file without the byte order mark.

    Raises:
        SourceError: it is text in UTF-16.
    """
    if text.startswith(_UTF_16_MARKS) or text[:2].count(0) == 1:
        raise SourceError(f"{path} is text in UTF-16, and UTF-8 is read; convert it: iconv -f UTF-16 -t UTF-8")
    return text.removeprefix(_BYTE_ORDER_MARK)
