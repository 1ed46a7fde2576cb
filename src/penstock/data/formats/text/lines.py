"""Lines of text files, plain or gzip, with their places: what JSONL and CSV are made of.

    line       ends at a line feed; a carriage return before it is white space of the format above. With `any_end=True`
               a carriage return alone ends a line, too
    offset     of bytes, in what a gzip file unpacks to
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


def blocks(storage: Storage, path: str, longest: int, *, any_end: bool = False) -> Generator[Block, None, None]:
    """Yield all lines of a file.

    Args:
        storage: opens the file.
        path: of a plain or gzip file; its first bytes decide which.
        longest: bytes; of a line that has more, one byte more than this is given.
        any_end: whether a carriage return that no line feed follows ends a line.

    Raises:
        SourceError: the file cannot be opened, or not be read to its end, or is text in UTF-16.
        RecordError: what gzip packed is broken; the lines before have been given.
    """
    offset, number = 0, 1
    begun, begun_nbytes = bytearray(), 0  # a line whose end has not come yet
    with closing(SequentialReader(storage, path)) as pieces:
        pieces.key = "line 1"
        while piece := pieces.take(READ_NBYTES):
            while any_end and piece.endswith(b"\r") and (following := pieces.take(1)):  # perhaps a line feed
                piece += following
            lines = piece.splitlines(keepends=True) if any_end else io.BytesIO(piece).readlines()
            rest = b"" if lines[-1].endswith((b"\n", b"\r") if any_end else b"\n") else lines.pop()
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
    if number == 1 and (line.startswith(_UTF_16_MARKS) or line[:2].count(0) == 1):
        raise SourceError(f"{path} is text in UTF-16, and UTF-8 is read; convert it: iconv -f UTF-16 -t UTF-8")
    if number == 1 and line.startswith(_BYTE_ORDER_MARK):
        return Block(len(_BYTE_ORDER_MARK), 1, [line[len(_BYTE_ORDER_MARK) :]])
    return Block(offset, number, [line])
