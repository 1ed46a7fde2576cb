"""Reads CSV with Python's csv module, which does not say at which byte a record begins, nor bound one that a missing
quote makes as long as the file: it is given lines one by one here, by what counts them.

Lines end at a line feed, a carriage return or both, also mixed in one file; in quotes all three belong to the value.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.data.formats.text.lines import Block, blocks
from penstock.data.storage.storage import Storage

_TOGETHER = 64
"""Lines that are parsed together: what they are made of stays in a core's own cache."""

_REASONS = {"unexpected end of data": "a quote is not closed before the file ends"}


class CsvRecords:
    """The records of one file. It is the iterator that csv.reader takes lines from."""

    def __init__(self, storage: Storage, path: str, delimiter: str, longest: int) -> None:
        self.offset = 0
        """Where the record that was read last begins."""
        self.number = 0
        """Of its first line."""
        self.next_offset = 0
        """Where the next line begins."""
        self.next_number = 1
        self._delimiter = delimiter
        self._longest = longest
        self._blocks = blocks(storage, path, longest, any_end=True)
        self._block = Block(0, 1, [])
        self._raw: list[bytes] = []
        self._raw_nbytes = 0
        self._reader = self._split(self)

    def next_lines(self) -> list[bytes]:
        """Return lines that come next, and leave them to be read; none at the end of the file."""
        at = self.next_number - self._block.number
        if at == len(self._block.lines):
            self._block = next(self._blocks, Block(self.next_offset, self.next_number, []))
            self.next_offset, at = self._block.offset, 0
        return self._block.lines[at : at + _TOGETHER]

    def skip(self, lines: list[bytes]) -> None:
        """Go on behind some of the next lines."""
        self.next_offset += sum(map(len, lines))
        self.next_number += len(lines)

    def rows(self, lines: list[bytes], first: int, step: int) -> tuple[list[list[str]], bool]:
        """Return the values of every `step`-th line, from line `first` on, and whether all are ASCII without "_".

        Raises:
            ValueError: not each of the lines is a record, or one is broken.
        """
        whole = b"".join(lines)
        if len(whole) > self._longest or any(map(bytes.isspace, lines)):
            raise ValueError("some lines are blank, or too long")
        is_plain = whole.isascii() and b"_" not in whole
        try:
            if b'"' not in whole and b"\r" not in whole:  # a fifth faster than the module
                text = b"".join(lines[first::step]).decode()
                return [line.split(self._delimiter) for line in text.removesuffix("\n").split("\n") if line], is_plain
            rows = list(self._split(map(bytes.decode, lines)))
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if len(rows) < len(lines):
            raise ValueError("a value has several lines")
        return rows[first::step], is_plain

    def read(self) -> list[str] | ValueError | None:
        """Return the values of the next record, or why it is broken; None at the end of the file."""
        self._raw, self._raw_nbytes = [], 0
        try:
            row = next(self._reader, None)
            b"".join(self._raw).decode()
        except csv.Error as error:
            return ValueError(_REASONS.get(str(error), str(error)))
        except UnicodeDecodeError as error:
            return error
        return row

    def bare_values(self, row: list[str]) -> list[str | None]:
        """Return the values of the record that was read last; None for those that have quotes."""
        text, at = b"".join(self._raw).decode(), 0
        found: list[str | None] = []
        for value in row:
            is_quoted = text.startswith('"', at)
            found.append(None if is_quoted else value)
            at += len(value) + 1 + (2 + value.count('"') if is_quoted else 0)
        return found

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while lines := self.next_lines():
            line = lines[0]
            if not self._raw:
                self.offset, self.number = self.next_offset, self.next_number
            self.next_offset += len(line)
            self.next_number += 1
            if self._raw or line.strip():
                self._raw.append(line)
                self._raw_nbytes += len(line)
                if self._raw_nbytes - len(line) + len(line.rstrip(b"\r\n")) > self._longest:
                    longest = f"max_record_nbytes={self._longest}"
                    raise csv.Error(f"it is longer than {longest}; perhaps a quote is not closed")
                return line.decode(errors="replace")
        raise StopIteration

    def _split(self, lines: Iterable[str]) -> Any:
        # The module's limit of 131072 characters for a value holds for the process, and cannot be set for one reader.
        csv.field_size_limit(max(csv.field_size_limit(), self._longest))
        return csv.reader(lines, delimiter=self._delimiter, strict=True)
