"""Splits CSV into records, with the place of each and the text of its values.

Python's csv module gives neither the byte at which a record begins, nor whether a value had quotes, nor a limit for a
record that a missing quote makes as long as the file.

A line without quotes is a record. So is one that matches an expression for well-formed records. If a quote is open at
its end, the record goes on in the next lines, up to one that closes the quote.

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

_CLOSES = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
"""From within a quote to its end."""

_Line = tuple[int, int, bytes, str]
"""Its offset, its number, its bytes, and what ended it."""


class CsvRecord:
    """A record; it is split when its values are asked for."""

    __slots__ = ("_found", "_rows", "number", "offset")

    def __init__(self, offset: int, number: int, found: bytes | ValueError, rows: RecordSplitter) -> None:
        self.offset = offset
        self.number = number
        self._found = found
        self._rows = rows

    def values(self) -> list[str]:
        """Return its values.

        Raises:
            ValueError: it is broken; the message is the reason.
        """
        text = self._text()
        if '"' not in text:
            return text.split(self._rows.delimiter)
        return [quoted.replace('""', '"') if quoted else bare for quoted, bare in self._rows.value.findall(text)]

    def split_values(self) -> list[str]:
        """Return its values; those that had quotes are `QuotedText`.

        Raises:
            ValueError: it is broken; the message is the reason.
        """
        found = self._rows.value.finditer(self._text())
        return [one[2] if one[1] is None else QuotedText(one[1].replace('""', '"')) for one in found]

    def _text(self) -> str:
        if isinstance(self._found, ValueError):
            raise self._found
        return self._found.decode().removesuffix("\r")


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
        quoted, bare = r'"([^"]*+(?:""[^"]*+)*+)"', rf'((?!")[^{end}]*+)'
        one = f"(?:{quoted}|{bare})"
        self.value = re.compile(f"(?:^|{end}){one}")
        """Finds the values of a record."""
        before = f"(?:{one}{end})*+".encode()
        self._whole = re.compile(before + one.encode() + b"\r?")
        self._open = re.compile(before + rb'"[^"]*+(?:""[^"]*+)*+')
        self._closed = re.compile(before + quoted.encode())

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
                yield CsvRecord(offset, number, self._too_long_error(), self)
            elif b'"' in line:
                yield CsvRecord(offset, number, self._completed(line, end, lines), self)
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

    def _completed(self, line: bytes, end_of_line: str, lines: Iterator[_Line]) -> bytes | ValueError:
        """Return a record that begins with `line`, and with those lines that a quote takes in; or why it is broken."""
        parts, nbytes, rest = [line], len(line), line
        while self._whole.fullmatch(rest) is None:
            if self._open.fullmatch(rest) is None:
                closed = self._closed.match(rest)
                after = rest[closed.end() if closed else 0 :][:10].decode(errors="replace")
                return ValueError(f"after the closing quote comes {after!r}, not a delimiter")
            closes = None
            while closes is None:
                following = next(lines, None)
                if following is None:
                    return ValueError("a quote is not closed before the file ends")
                rest = following[2]
                nbytes += len(rest) + 1
                if nbytes > self._longest:
                    return self._too_long_error()
                parts += [end_of_line.encode(), rest]
                end_of_line = following[3]
                closes = _CLOSES.match(rest)
            rest = b'""' + rest[closes.end() :]
        return b"".join(parts)

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
