"""CSV and TSV, read by pyarrow: a header, and rows of text that columns make numbers of. Plain, or packed.

    header       the first row; its names are the fields. `header=` gives them where a file has none
    delimiter    that of , tab ; and | which makes as many values of each of the first rows; or `delimiter=`
    quotes       a value that begins with " ends at the next single "; it may hold delimiters and line feeds, and "" is
                 one ". `quoting=False` has " as a character as others are
    columns      what all values of a column are: int64, float64 (an empty one is NaN), bool (true, false), or text. An
                 integer that float64 does not hold beside fractions is refused. `dtypes=` overrides it
    looked at    whole files, up to 256 MiB of a set (64 MiB of remote files); of larger sets as much of each file as is
                 its share, 8 MiB at least, until these bytes are read
    files        all have the first one's header; one without any, as it is empty, has no rows

A row with more or fewer values than the header, or a value that is none of its column's, is broken, and the next row is
read. Files are read in chunks of whole rows, which end at a line's end in front of which quotes come in pairs.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import re
from collections import Counter
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.partition_names import check_left_out
from penstock.data.formats.text.lines import LONGEST, without_mark
from penstock.data.optional import need
from penstock.data.sample_batch import samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection, fitted
from penstock.data.storage.sequential_reader import READ_NBYTES, SequentialReader
from penstock.data.storage.sequential_writer import SequentialWriter
from penstock.data.storage.storage import Storage, is_remote
from penstock.data.stream import Shard, Stream

_KINDS = ("text", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_FLOATS = ("float16", "float32", "float64")
_BOOLS = ("true", "True", "TRUE", "false", "False", "FALSE")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./ -]*")

_DELIMITERS = ",\t;|"
_FIRST_ROWS = 50
"""By which the delimiter is chosen."""
_LOOKED_AT_NBYTES = 256 << 20
_LOOKED_AT_REMOTELY_NBYTES = 64 << 20
_LEAST_NBYTES = 8 << 20
"""Of a file of a large set that is looked at."""
_LONG_INT = r"^-?[0-9]{16,}$"
_EXACT = 1 << 53
"""Up to here float64 has all integers."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    dtypes: Mapping[str, str] | None = None,
    delimiter: str | None = None,
    header: Sequence[str] | None = None,
    quoting: bool = True,
    max_record_nbytes: int = LONGEST,
) -> CsvStream:
    """Open CSV files as a stream.

    Args:
        paths: the files; each is a shard, and all that are not empty have the first one's header.
        storage: opens them.
        fields: which columns are read.
        errors: what to do with a row that is broken.
        dtypes: {column: dtype} for columns that are not what their values seem to be: "float32", "int8", "text" ...
        delimiter: one character between values; None for that of , tab ; and | which the first rows have.
        header: the columns' names, if the files have no header.
        quoting: whether " encloses values.
        max_record_nbytes: a longer row is broken, and so is what follows it. One of many tiny values takes some 40
            times its bytes.

    Raises:
        SourceError: the first file cannot be opened, no file has a header, or a column has no one type in all files.
        OptionError: a dtype is unknown, or the delimiter has several characters.
        ExtraError: pyarrow is not installed.
    """
    need("pyarrow.csv", "parquet")
    reader = _Reader(storage, None if header is None else tuple(header), quoting, max_record_nbytes)
    if delimiter is None:
        delimiter = reader.choose_delimiter(paths[0])
    if len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise OptionError(f"delimiter={delimiter!r} has to be one ASCII character, and no quote")
    reader = replace(reader, delimiter=delimiter)
    known = dtypes or {}
    names, seen = _look_at(reader, paths, known)
    for name, kind in known.items():
        if name not in names:
            raise SourceError(f"{paths[0]} has no column {name!r}; it has {', '.join(map(repr, names))}")
        if kind not in (*_KINDS, *_FLOATS):
            raise OptionError(f"dtypes[{name!r}] is {kind!r}; it has to be one of {', '.join((*_KINDS, *_FLOATS))}")
    check_left_out(paths, lambda: names, fields, "open each folder alone, to add {} by map()")
    chosen = fields.names(names, paths[0])
    kinds = {own: known.get(own) or seen[own].kind(own) for own in chosen.values()}
    return CsvStream(paths, reader, names, chosen, kinds, errors)


class CsvStream(Stream):
    """Rows of CSV files, one after another."""

    def __init__(
        self,
        paths: list[str],
        reader: _Reader,
        names: list[str],
        chosen: dict[str, str],
        kinds: dict[str, str],
        errors: Errors,
    ) -> None:
        super().__init__([Shard(path) for path in paths], errors=errors)
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._reader = reader
        self._names = names
        self._chosen = chosen
        self._kinds = kinds
        """By the columns' own names."""

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield every `step`-th row of a shard, from row `first` on, the header and blank lines not counted."""
        number = 0  # of the next row
        with contextlib.closing(self._reader.tables(shard.name, self._names, self._kinds)) as tables:
            for table in tables:
                if isinstance(table, RecordError):
                    if number >= first and (number - first) % step == 0:
                        yield table
                    number += 1
                    continue
                begin = (first - number) % step if number >= first else first - number
                if step > 1 or begin:
                    wanted = np.arange(begin, table.num_rows, step)
                    yield from self._samples(shard.name, table.take(wanted), number + wanted)
                else:
                    yield from self._samples(shard.name, table, range(number, number + table.num_rows))
                number += table.num_rows

    def _samples(self, path: str, table: Any, numbers: Iterable[int]) -> Iterator[Sample | RecordError]:
        try:
            columns = {own: _convert(table.column(own), kind) for own, kind in self._kinds.items()}
        except ValueError:
            for at, number in enumerate(numbers):
                yield self._sample(path, table.slice(at, 1), number)
        else:
            yield from samples_of([*self._chosen], [columns[own] for own in self._chosen.values()])

    def _sample(self, path: str, row: Any, number: int) -> Sample | RecordError:
        sample: Sample = {}
        for name, own in self._chosen.items():
            try:
                (sample[name],) = _convert(row.column(own), self._kinds[own])
            except ValueError as error:
                value, kind = row.column(own).cast("binary")[0].as_py()[:40].decode(errors="replace"), self._kinds[own]
                reason = f"column {own!r} has {value!r}, which is no {kind} ({error}); dtypes= sets another"
                return RecordError(path, -1, f"row {number + 1}", reason)
        return sample


# ── rows of text ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Reader:
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
        first = [*self.header] if self.header is not None else next(self._first_rows(path, self.delimiter), None)
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
            rows = [*itertools.islice(self._first_rows(path, one), _FIRST_ROWS)]
            counts[one] = len(rows[0]) if len({*map(len, rows)}) == 1 else 1
        return max(counts, key=counts.__getitem__)  # the first of several

    def tables(self, path: str, names: list[str], kinds: Mapping[str, str]) -> Generator[Any, None, None]:
        """Yield tables of the wanted columns, and a RecordError in the place of each row of another length.

        Columns are text, or floats if they are float64; bytes where a value of a chunk is neither.

        Args:
            path: of a file.
            names: of its columns.
            kinds: of those that are wanted, with what they hold.

        Raises:
            RecordError: the file has another header, or the rest of it cannot be read.
        """
        arrow = need("pyarrow", "parquet")
        count, is_first = 0, self.header is None
        for chunk in self._chunks(path):
            if is_first and (found := next(self._split(path, chunk, self.delimiter))) != names:
                raise RecordError(path, 0, "header", f"its columns are {str(found)[:200]}, the first file's {names}")
            try:
                table, broken = self._table(chunk, names, kinds, is_first)
            except arrow.ArrowInvalid as error:
                raise RecordError(path, -1, "after the last row", str(error)) from error
            is_first, begin = False, 0
            for number, (place, reason) in enumerate(broken):
                yield table.slice(begin, place - begin)
                yield RecordError(path, -1, f"row {count + place + number + 1}", reason)
                begin = place
            yield table.slice(begin)
            count += table.num_rows + len(broken)

    def _table(
        self, chunk: bytes, names: list[str], kinds: Mapping[str, str], has_header: bool
    ) -> tuple[Any, list[tuple[int, str]]]:
        arrow = need("pyarrow", "parquet")
        as_bytes = dict.fromkeys(kinds, arrow.binary())
        try:
            chunk.isascii() or chunk.decode()
        except UnicodeDecodeError:  # Arrow decodes rows that are broken, to tell of them: each byte becomes a letter
            table, broken = self._parse(chunk.decode("latin-1").encode(), names, as_bytes, has_header)
            columns = ([one.decode().encode("latin-1") for one in column.to_pylist()] for column in table.columns)
            return arrow.table([arrow.array(column, arrow.binary()) for column in columns], table.column_names), broken
        usual = {own: arrow.float64() if kind == "float64" else arrow.string() for own, kind in kinds.items()}
        with contextlib.suppress(arrow.ArrowInvalid):
            return self._parse(chunk, names, usual, has_header)
        return self._parse(chunk, names, as_bytes, has_header)

    def _parse(
        self, chunk: bytes, names: list[str], types: dict[str, Any], has_header: bool
    ) -> tuple[Any, list[tuple[int, str]]]:
        """Return a table, and where rows that are broken lie in it, and why they are."""
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

        read = reader.ReadOptions(
            column_names=names,
            skip_rows_after_names=int(has_header),
            use_threads=False,
            block_size=len(chunk) + 1,
        )
        parse = reader.ParseOptions(
            delimiter=self.delimiter,
            quote_char='"' if self.quoting else False,
            newlines_in_values=self.quoting,
            invalid_row_handler=handle,
        )
        convert = reader.ConvertOptions(
            column_types=types, include_columns=[*types], null_values=[""], strings_can_be_null=False
        )
        return reader.read_csv(arrow.BufferReader(chunk), read, parse, convert), broken

    def _first_rows(self, path: str, delimiter: str) -> Iterator[list[str]]:
        with contextlib.closing(self._chunks(path)) as chunks:
            for chunk in itertools.islice(chunks, 1):
                yield from self._split(path, chunk, delimiter)

    def _split(self, path: str, chunk: bytes, delimiter: str) -> Iterator[list[str]]:
        lines = io.StringIO(chunk.decode(errors="replace"), newline="")
        try:
            rows = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if self.quoting else csv.QUOTE_NONE)
            yield from (row for row in rows if row)
        except csv.Error as error:
            raise SourceError(f"{path}: its first rows cannot be read: {error}") from error

    def _chunks(self, path: str) -> Generator[bytes, None, None]:
        """Yield whole rows; blank ones at the beginning are left out."""
        with contextlib.closing(SequentialReader(self.storage, path)) as pieces:
            pieces.key = "row 1"
            rest, more = without_mark(path, pieces.take(READ_NBYTES)).lstrip(b"\r\n"), b"?"
            while more:
                more = pieces.take(max(READ_NBYTES, len(rest)))
                rest += more
                end = self._end(rest) if more else len(rest)
                if rest[:end].strip():
                    yield rest[:end]
                rest = rest[end:]
                if len(rest) > self.longest:
                    reason = f"it is longer than max_record_nbytes={self.longest}; perhaps a quote is not closed"
                    raise RecordError(path, -1, "after the last row", reason)

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


# ── what columns hold ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Seen:
    """What has been seen of a column."""

    kinds: set[str] = dataclasses.field(default_factory=lambda: {"int64", "float64", "bool"})
    """Those that all values are of, without the empty ones."""
    has_values: bool = False
    has_empty: bool = False
    wide: str = ""
    """An integer that float64 does not hold, and the file that has it."""
    wide_in: str = ""

    def add(self, values: Any, path: str) -> None:
        """Look at some more values of a file, as text or its bytes."""
        compute = need("pyarrow.compute", "parquet")
        values = _cast(values, "string")
        if values is None:  # some rows are no UTF-8, and broken
            self.kinds.clear()
            return
        there = compute.not_equal(values, "")
        if not compute.all(there, min_count=0).as_py():
            self.has_empty, values = True, values.filter(there)
        if not self.kinds or not len(values):
            return
        self.has_values = True
        if "bool" in self.kinds and not (values[0].as_py() in _BOOLS and _are_bools(values)):
            self.kinds.remove("bool")
        numbers = None
        if "int64" in self.kinds:
            numbers = _cast(values, "int64")
            if numbers is None:
                self.kinds.remove("int64")
            elif _has_hex(values):
                self.kinds -= {"int64", "float64"}
        if "float64" in self.kinds and "int64" not in self.kinds:
            numbers = _cast(values, "float64")
            if numbers is None:
                self.kinds.remove("float64")
        is_number = numbers is not None and "float64" in self.kinds
        if is_number and max(map(abs, compute.min_max(numbers).as_py().values())) >= _EXACT:
            self._add_long(values.filter(compute.match_substring_regex(values, _LONG_INT)).to_pylist(), path)

    def _add_long(self, values: list[str], path: str) -> None:
        """Look at integers that float64 may not hold."""
        if any(not -(1 << 63) <= int(value) < 1 << 63 for value in values):
            self.kinds -= {"int64", "float64"}
        wide = next((value for value in values if float(value) != int(value)), "")
        if wide and not self.wide:
            self.wide, self.wide_in = wide, path

    def kind(self, name: str) -> str:
        """Return the type that holds all values.

        Raises:
            SourceError: there is none.
        """
        is_number = self.has_values and not self.kinds.isdisjoint(("int64", "float64"))
        if not is_number:
            return "bool" if self.has_values and "bool" in self.kinds and not self.has_empty else "text"
        if "int64" in self.kinds and not self.has_empty:
            return "int64"
        if self.wide:
            raise SourceError(
                f"{self.wide_in}: column {name!r} has {self.wide}, which float64 does not hold, and fractions or "
                f"empty values; say what it is: dtypes={{{name!r}: 'text'}}"
            )
        return "float64"


def _look_at(reader: _Reader, paths: Sequence[str], known: Container[str]) -> tuple[list[str], dict[str, _Seen]]:
    """Return the names of a set's columns, and what was seen of those that are not known.

    A later file that cannot be read, or has another header, is left for its reader to say so.

    Raises:
        SourceError: the first file cannot be read, or no file has a header.
    """
    names, seen = None, dict[str, _Seen]()
    left = _LOOKED_AT_REMOTELY_NBYTES if is_remote(paths[0]) else _LOOKED_AT_NBYTES
    share = max(_LEAST_NBYTES, left // len(paths))
    for path in paths:
        if names is None:
            names = reader.names(path)
            seen = {name: _Seen() for name in names or () if name not in known}
        if names is not None and left > 0:
            nbytes = 0
            tables = reader.tables(path, names, dict.fromkeys(seen, "text"))
            with contextlib.suppress(SourceError), contextlib.closing(tables):
                for table in tables:
                    if isinstance(table, RecordError):
                        continue
                    for name, column in seen.items():
                        if column.kinds:
                            column.add(table.column(name), path)
                    nbytes += table.nbytes
                    if nbytes > share:
                        break
            left -= nbytes
    if names is None:
        raise SourceError(f"{paths[0]} has no header; it is empty" + (", and so are the others" * (len(paths) > 1)))
    return names, seen


def _cast(values: Any, kind: str) -> Any:
    """Return values as numbers; None if one of them is none, which is found soon in a column of text."""
    with contextlib.suppress(need("pyarrow", "parquet").ArrowInvalid):
        return values if str(values.type) == kind else values.cast(kind)
    return None


def _are_bools(values: Any) -> bool:
    arrow, compute = need("pyarrow", "parquet"), need("pyarrow.compute", "parquet")
    return bool(compute.all(compute.is_in(values, value_set=arrow.array(_BOOLS)), min_count=0).as_py())


def _has_hex(values: Any) -> bool:
    """Return whether one is written as 0x1F, which Arrow takes for a number."""
    compute = need("pyarrow.compute", "parquet")
    return bool(compute.any(compute.match_substring(values, "x", ignore_case=True), min_count=0).as_py())


def _convert(column: Any, kind: str) -> Sequence[Any] | np.ndarray:
    """Return the values of a column of text, or of floats with nulls.

    Raises:
        ValueError: one of them is none of this kind.
    """
    arrow, compute = need("pyarrow", "parquet"), need("pyarrow.compute", "parquet")
    if arrow.types.is_floating(column.type):
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    column = column if arrow.types.is_string(column.type) else column.cast("string")
    if kind == "text":
        return column.to_pylist()  # type: ignore[no-any-return]
    if kind == "bool":
        if not _are_bools(column):
            raise ValueError("it is neither true nor false")
        return [value in _BOOLS[:3] for value in column.to_pylist()]
    if kind in _FLOATS:
        floats = compute.if_else(compute.equal(column, ""), "nan", column).cast("float64").to_numpy()
        if kind == "float64":
            return floats.tolist()  # type: ignore[no-any-return]
        with np.errstate(over="ignore"):
            made: np.ndarray = floats.astype(kind)
        if (np.isinf(made) & np.isfinite(floats)).any():
            raise ValueError("it is too large")
        return made
    if _has_hex(column):
        raise ValueError("it is no decimal number")
    ints: np.ndarray = column.cast(kind).to_numpy()
    return ints.tolist() if kind == "int64" else ints


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


class CsvWriter:
    """Writes a new CSV file; a TSV file where its name has .tsv; one packed by gzip where it ends on .gz.

    Args:
        path: the file.
        schema: of the samples: numbers and text only.
        delimiter: one character between values; taken from the name if it is None.

    Raises:
        SourceError: the file cannot be made, or the samples have fields that are neither numbers nor text.
    """

    def __init__(self, path: str, schema: Schema, *, delimiter: str | None = None) -> None:
        for name, field in schema.items():
            if field.kind not in ("number", "text") or field.dtype.startswith("complex"):
                raise SourceError(f"field {name!r} is {field.words()}; CSV holds real numbers and text only")
        self._path = path
        self._schema = schema
        self._delimiter = delimiter or ("\t" if ".tsv" in path.lower().rpartition("/")[2] else ",")
        self._file = SequentialWriter(path)
        self._put([name if _PLAIN_NAME.fullmatch(name) else _quote(name) for name in schema])

    def write(self, sample: Sample) -> None:
        """Add a row."""
        self._put([_format_value(value) for value in fitted(self._schema, sample, self._path).values()])

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _put(self, values: list[str]) -> None:
        self._file.write((self._delimiter.join(values) + "\n").encode())


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, np.bool_):
        return "true" if value else "false"
    return repr(value.item())  # the shortest digits that give the same number


def _quote(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'


def why_unsupported(schema: Schema) -> str:
    """Return why samples would not come back from CSV as they are; "" if they would.

    >>> from penstock.data.schema import Field
    >>> why_unsupported({"x": Field("number", "int64")}), why_unsupported({"x": Field("bytes")})
    ('', "field 'x' is bytes, and CSV holds numbers and text only")
    """
    if not schema:
        return "there are no fields, and CSV has no rows without any"
    for name, field in schema.items():
        if field.kind in ("array", "bytes"):
            return f"field {name!r} is {field.words()}, and CSV holds numbers and text only"
        if field.kind == "number" and field.dtype not in ("bool", "int64", "float64"):
            return f"field {name!r} is {field.dtype}, and comes back from CSV as another type unless dtypes= is set"
    return ""
