"""Splits CSV into records, with the place of each and the text of its values.

Python's csv module gives neither the byte at which a record begins, nor whether a value had quotes, nor a limit for a
record that a missing quote makes as long as the file.

A line without quotes is a record. So is one with quotes that match an expression for well-formed records. Any other
line is split character by character, and the record continues in the next line while a quote is open.

Lines end at a line feed, a carriage return or both, also mixed in one file, as for Python's csv; in quotes all three
belong to the value.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Generator, Iterator

from penstock.data.formats.text.lines import Block, blocks, is_blank
from penstock.data.storage.storage import Storage

_TOGETHER = 64
"""Lines that are parsed together: what they are made of stays in a core's own cache."""

_Line = tuple[int, int, bytes, str]
"""Its offset, its number, its bytes, and what ended it."""


class CsvRecord:
    """A record; a record of one line is split when its values are asked for."""

    __slots__ = ("_found", "_line", "_rows", "number", "offset")

    def __init__(
        self, offset: int, number: int, line: bytes, rows: RecordSplitter, found: list[str] | ValueError | None = None
    ) -> None:
        self.offset = offset
        self.number = number
        self._line = line
        self._rows = rows
        self._found = found

    def values(self) -> list[str]:
        """Return its values.

        Raises:
            ValueError: it is broken; the message is the reason.
        """
        if self._found is not None:
            return self.split_values()
        text = self._line.decode().removesuffix("\r")
        if '"' not in text:
            return text.split(self._rows.delimiter)
        found = self._rows.value.findall(text)
        return [quoted.replace('""', '"') if quoted else bare for quoted, bare in found]

    def split_values(self) -> list[str]:
        """Return its values; those that had quotes are `QuotedText`.

        Raises:
            ValueError: it is broken; the message is the reason.
        """
        found = self._rows.split(self._line, "", iter(())) if self._found is None else self._found
        if isinstance(found, ValueError):
            raise found
        return found


class QuotedText(str):
    """A value that had quotes."""

    __slots__ = ()


class RecordSplitter:
    """Finds where records begin and end, and splits them."""

    def __init__(self, storage: Storage, delimiter: str, longest: int) -> None:
        self.delimiter = delimiter
        self._storage = storage
        self._longest = longest
        end = re.escape(delimiter)
        quoted, bare = r'"([^"]*+(?:""[^"]*+)*+)"', rf'([^"{end}]*+)'
        self.value = re.compile(f"(?:^|{end})(?:{quoted}|{bare})")
        """Finds the values of a line that `_whole` matches."""
        self._whole = re.compile(f"(?:{quoted}|{bare})(?:{end}(?:{quoted}|{bare}))*+\r?".encode())

    def read_records(self, path: str) -> Generator[CsvRecord, None, None]:
        """Yield the records of a file, the header among them."""
        for found in self.read(path, None):
            if isinstance(found, CsvRecord):
                yield found

    def read(self, path: str, columns: int | None) -> Generator[CsvRecord | Block, None, None]:
        """Yield the records of a file, or blocks of which each line is a record of so many values without quotes.

        Args:
            path: of the file.
            columns: None for records only.
        """
        with contextlib.closing(blocks(self._storage, path, self._longest, any_end=True)) as pieces:
            lines = _Lines(pieces)
            while (block := lines.next_block()) is not None:
                parts = [block] if columns is None else block.parts(_TOGETHER)
                if columns is not None and all(self._is_plain(part, columns) for part in parts):
                    yield from parts
                else:
                    lines.open(block)
                    yield from self._records(lines)

    def records_of(self, block: Block) -> Generator[CsvRecord, None, None]:
        """Yield the records of a block that `read` has yielded."""
        lines = _Lines(iter(()))
        lines.open(block)
        return self._records(lines)

    def _records(self, lines: _Lines) -> Generator[CsvRecord, None, None]:
        while (one := lines.next_in_block()) is not None:
            offset, number, line, end = one
            if len(line) > self._longest:
                yield CsvRecord(offset, number, line, self, self._too_long_error())
            elif b'"' in line:
                is_whole = self._whole.fullmatch(line) is not None
                yield CsvRecord(offset, number, line, self, None if is_whole else self.split(line, end, lines))
            elif not is_blank(line):
                yield CsvRecord(offset, number, line, self)

    def _is_plain(self, block: Block, columns: int) -> bool:
        lines, delimiter = block.lines, self.delimiter.encode()
        if block.ends is not None or columns < 2 or delimiter.isspace():  # a line of tabs only is blank
            return False
        whole = b"\n".join(lines)
        if len(whole) > self._longest or b'"' in whole or b"\r" in whole:
            return False
        return {line.count(delimiter) for line in lines} == {columns - 1}

    def split(self, line: bytes, end_of_line: str, lines: Iterator[_Line]) -> list[str] | ValueError:
        """Return the values of a record that begins with `line`; reads more lines while a quote is open."""
        values: list[str] = []
        nbytes = len(line)
        try:
            text, at = line.decode(), 0
            while True:
                if text[at : at + 1] != '"':
                    end = text.find(self.delimiter, at)
                    if end < 0:
                        values.append(text[at:].removesuffix("\r"))
                        return values
                    values.append(text[at:end])
                    at = end + 1
                    continue
                held, at = [], at + 1
                while (end := _closing_quote(text, at)) < 0:
                    held.append(text[at:])
                    following = next(lines, None)
                    if following is None:
                        return ValueError("a quote is not closed before the file ends")
                    nbytes += len(following[2]) + 1
                    if nbytes > self._longest:
                        return self._too_long_error()
                    text, at = end_of_line + following[2].decode(), 0
                    end_of_line = following[3]
                held.append(text[at:end])
                values.append(QuotedText("".join(held).replace('""', '"')))
                if text[end + 1 :] in ("", "\r"):
                    return values
                if text[end + 1] != self.delimiter:
                    return ValueError(f"after the closing quote comes {text[end + 1 : end + 11]!r}, not a delimiter")
                at = end + 2
        except UnicodeDecodeError as error:
            return error

    def _too_long_error(self) -> ValueError:
        return ValueError(f"it is longer than max_record_nbytes={self._longest}; perhaps a quote is not closed")


class _Lines:
    """The lines of a file, which a record may take beyond the end of their block."""

    def __init__(self, pieces: Iterator[Block]) -> None:
        self._pieces = pieces
        self._rest: Iterator[_Line] = iter(())

    def next_block(self) -> Block | None:
        return next(self._pieces, None)

    def open(self, block: Block) -> None:
        ends = itertools.repeat("\n") if block.ends is None else (end.decode() for end in block.ends)
        numbers = itertools.count(block.number)
        self._rest = zip(block.offsets(), numbers, block.lines, ends, strict=False)

    def next_in_block(self) -> _Line | None:
        return next(self._rest, None)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> _Line:
        while (line := self.next_in_block()) is None:
            block = self.next_block()
            if block is None:
                raise StopIteration
            self.open(block)
        return line


def _closing_quote(text: str, at: int) -> int:
    """Return where the first quote is that is not one of two; -1 without.

    >>> _closing_quote('a""b"', 0), _closing_quote('a""', 0)
    (4, -1)
    """
    while (at := text.find('"', at)) >= 0 and text[at + 1 : at + 2] == '"':
        at += 2
    return at
