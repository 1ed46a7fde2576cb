"""Reads the rows of a CSV file by pyarrow, and tells which rows are broken.

A chunk is some whole rows: it ends at a line's end, in front of which quotes come in pairs.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import RecordError, SourceError
from penstock.data.formats.text.lines import without_mark
from penstock.data.optional import need
from penstock.data.storage.sequential_reader import READ_NBYTES, SequentialReader
from penstock.data.storage.storage import Storage

_DELIMITERS = ",\t;|"
_LOOKED_AT = 50
"""Rows by which the delimiter is chosen."""


@dataclass(frozen=True, slots=True)
class CsvRows:
    """How the files of a set are read."""

    storage: Storage
    header: tuple[str, ...] | None
    """The names of columns, of files without a header."""
    quoting: bool
    longest: int
    """The most bytes of a row."""
    delimiter: str = ","

    def names(self, path: str) -> list[str] | None:
        """Return the names of a file's columns; None for a file without any.

        Raises:
            SourceError: it cannot be read, or two columns have one name.
        """
        first = [*self.header] if self.header is not None else next(self._first_rows(path), None)
        if first and "\ufffd" in "".join(first):
            raise SourceError(f"{path}: the header cannot be read: it is no UTF-8")
        name, times = Counter(first).most_common(1)[0] if first else ("", 0)
        if times > 1:
            raise SourceError(f"{path} has {times} columns {name[:80]!r}; pass header= with names that differ")
        return first

    def choose_delimiter(self, path: str) -> str:
        """Return which of , tab ; and | makes as many values of each of the first rows; a comma, or a tab of .tsv."""
        usual = "\t" if ".tsv" in path.lower().rpartition("/")[2] else ","
        counts = {}
        for one in sorted(_DELIMITERS, key=lambda one: one != usual):
            rows = [*itertools.islice(self._first_rows(path, one), _LOOKED_AT)]
            counts[one] = len(rows[0]) if len({*map(len, rows)}) == 1 else 1
        return max(counts, key=counts.__getitem__)  # the first of several

    def batches(self, path: str, names: list[str], kinds: Mapping[str, str]) -> Generator[Any, None, None]:
        """Yield tables, and a RecordError in the place of each broken row.

        Args:
            path: of a file.
            names: of its columns.
            kinds: of those that are wanted, with what they hold. float64 and text come as such, if all values of a
                table are; others as bytes.

        Raises:
            RecordError: the file has another header, or the rest of it cannot be read.
        """
        count, is_first = 0, self.header is None
        for offset, chunk in self._chunks(path):
            if is_first and (found := next(self._split(path, chunk, self.delimiter))) != names:
                words = f"its columns are {str(found)[:200]}, the first file's {names}"
                raise RecordError(path, 0, "header", words)
            table, broken = self._parse(path, offset, chunk, names, kinds, is_first)
            is_first, begin = False, 0
            for number, (place, reason) in enumerate(broken):
                yield table.slice(begin, place - begin)
                yield RecordError(path, -1, f"row {count + place + number + 1}", reason)
                begin = place
            yield table.slice(begin)
            count += table.num_rows + len(broken)

    def _parse(
        self, path: str, offset: int, chunk: bytes, names: list[str], kinds: Mapping[str, str], has_header: bool
    ) -> tuple[Any, list[tuple[int, str]]]:
        """Return a table, and where rows that are broken lie in it, and why they are."""
        arrow = need("pyarrow", "parquet")
        usual = {"float64": arrow.float64(), "text": arrow.string()}
        types = {own: usual.get(kind, arrow.binary()) for own, kind in kinds.items()}
        as_bytes = dict.fromkeys(kinds, arrow.binary())
        try:
            if _is_utf8(chunk):
                with suppress(arrow.ArrowInvalid):
                    return self._read(chunk, names, types, has_header)
                return self._read(chunk, names, as_bytes, has_header)
            # Arrow decodes rows that are broken, to tell of them: it is given each byte as a letter.
            table, broken = self._read(chunk.decode("latin-1").encode(), names, as_bytes, has_header)
        except arrow.ArrowInvalid as error:
            raise RecordError(path, offset, "after the last row", str(error)) from error
        columns = ([value.decode().encode("latin-1") for value in column.to_pylist()] for column in table.columns)
        return arrow.table([arrow.array(column, arrow.binary()) for column in columns], table.column_names), broken

    def _read(
        self, chunk: bytes, names: list[str], types: dict[str, Any], has_header: bool
    ) -> tuple[Any, list[tuple[int, str]]]:
        arrow, reader = need("pyarrow", "parquet"), need("pyarrow.csv", "parquet")
        broken: list[tuple[int, str]] = []
        blank = 0

        def handle(row: Any) -> str:
            nonlocal blank
            if row.text.strip():
                place = row.number - 1 - has_header - len(broken) - blank
                broken.append((place, f"it has {row.actual_columns} values, the header {row.expected_columns}"))
            else:
                blank += 1
            return "skip"

        table = reader.read_csv(
            arrow.BufferReader(chunk),
            reader.ReadOptions(
                column_names=names,
                skip_rows_after_names=int(has_header),
                use_threads=False,
                block_size=len(chunk) + 1,
            ),
            reader.ParseOptions(
                delimiter=self.delimiter,
                quote_char='"' if self.quoting else False,
                newlines_in_values=self.quoting,
                invalid_row_handler=handle,
            ),
            reader.ConvertOptions(
                column_types=types, include_columns=[*types], null_values=[""], strings_can_be_null=False
            ),
        )
        return table, broken

    def _first_rows(self, path: str, delimiter: str = "") -> Iterator[list[str]]:
        with closing(self._chunks(path)) as chunks:
            for _, chunk in itertools.islice(chunks, 1):
                yield from self._split(path, chunk, delimiter or self.delimiter)

    def _split(self, path: str, chunk: bytes, delimiter: str) -> Iterator[list[str]]:
        lines = io.StringIO(chunk.decode(errors="replace"), newline="")
        try:
            rows = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if self.quoting else csv.QUOTE_NONE)
            yield from (row for row in rows if row)
        except csv.Error as error:
            raise SourceError(f"{path}: its first rows cannot be read: {error}") from error

    def _chunks(self, path: str) -> Generator[tuple[int, bytes], None, None]:
        """Yield where each chunk begins, and its bytes."""
        with closing(SequentialReader(self.storage, path)) as pieces:
            pieces.key = "row 1"
            offset, rest, more = 0, without_mark(path, pieces.take(READ_NBYTES)).lstrip(b"\r\n"), b"?"
            while more:
                more = pieces.take(max(READ_NBYTES, len(rest)))
                rest += more
                end = self._end(rest) if more else len(rest)
                if end and rest[:end].strip():
                    yield offset, rest[:end]
                offset, rest = offset + end, rest[end:]
                if len(rest) > self.longest:
                    raise RecordError(
                        path,
                        offset,
                        "after the last row",
                        f"it is longer than max_record_nbytes={self.longest}; perhaps a quote is not closed",
                    )

    def _end(self, data: bytes) -> int:
        """Return where the last row of `data` ends that is whole for sure; 0 if none is."""
        line, quote = max(data.rfind(b"\n"), data.rfind(b"\r")), -1
        if not self.quoting:
            return line + 1
        is_even, stop = data.count(b'"', 0, line + 1) % 2 == 0, line + 1
        while line >= 0:
            quote = data.rfind(b'"', 0, stop)
            if is_even and line > quote:
                return line + 1
            stop, is_even = max(0, quote), not is_even
            line = max(data.rfind(b"\n", 0, stop), data.rfind(b"\r", 0, stop))
        return 0


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
