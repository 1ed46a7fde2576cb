"""CSV and TSV: a header, and rows of text that columns make numbers of. Plain or gzip.

    header       the first record; its names are the fields. `header=` gives them where a file has none
    delimiter    a comma; a tab where the name has .tsv; or `delimiter=`
    quotes       a value that begins with " ends at the next single "; it may hold delimiters and line feeds, and "" is
                 one ". Elsewhere a " is a character as others are (RFC 4180, as Python's csv reads it)
    lines        end at a line feed, a carriage return, or both; files may mix them
    blank        a line of white space only is no record, outside of quotes
    columns      what all values in the first 1000 rows are: int64, float64 (an empty one is NaN), bool (true, false),
                 or text; of several files see `csv_types`. `dtypes=` overrides it. Values in quotes are text, so that
                 "12" stays one. Numbers are of ASCII digits: 1_000 and Arabic digits are none, though Python takes them
    files        all have the first one's header; one without any, as it is empty, has no rows

A row with more or fewer values than the header, or a value that is none of its column's, is broken, and the next row is
read. `CsvWriter` quotes all text, so that what it wrote comes back with the types that it had.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.partition_names import check_left_out
from penstock.data.formats.text.csv_records import CsvRecords
from penstock.data.formats.text.csv_types import BOOLS, probe_files, type_of_column
from penstock.data.formats.text.lines import LONGEST, blocks
from penstock.data.sample_batch import samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection, fitted
from penstock.data.storage.sequential_reader import READ_NBYTES, SequentialReader
from penstock.data.storage.sequential_writer import SequentialWriter
from penstock.data.storage.storage import Storage
from penstock.data.stream import Shard, Stream

_KINDS = ("text", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_FLOATS = ("float16", "float32", "float64")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./ -]*")


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    dtypes: Mapping[str, str] | None = None,
    delimiter: str | None = None,
    header: Sequence[str] | None = None,
    max_record_nbytes: int = LONGEST,
) -> CsvStream:
    """Open CSV files as a stream.

    Args:
        paths: the files; each is a shard, and all that are not empty have the first one's header.
        storage: opens them.
        fields: which columns are read.
        errors: what to do with a row that is broken.
        dtypes: {column: dtype} for columns that are not what their first rows seem to be: "float32", "int8", "text" ...
        delimiter: one character between values.
        header: the columns' names, if the files have no header.
        max_record_nbytes: a longer row is broken. Parsing one of many tiny values takes some 40 times its bytes.

    Raises:
        SourceError: the first file cannot be opened, no file has a header, or a column has no one type in all files.
        OptionError: a dtype is unknown, or the delimiter has several characters.
    """
    if delimiter is None:
        delimiter = "\t" if ".tsv" in paths[0].lower().rpartition("/")[2] else ","
    if len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise OptionError(f"delimiter={delimiter!r} has to be one ASCII character, and no quote")
    open_records = partial(CsvRecords, storage, delimiter=delimiter, longest=max_record_nbytes)
    files = probe_files(paths, open_records, header)
    names = files[0].names
    for name, kind in (dtypes or {}).items():
        if name not in names:
            raise SourceError(f"{files[0].path} has no column {name!r}; it has {', '.join(map(repr, names))}")
        if kind not in (*_KINDS, *_FLOATS):
            raise OptionError(f"dtypes[{name!r}] is {kind!r}; it has to be one of {', '.join((*_KINDS, *_FLOATS))}")
    check_left_out(paths, lambda: names, fields, "open each folder alone, to add {} by map()")
    places = {name: names.index(there) for name, there in fields.names(names, files[0].path).items()}
    columns = [(name, place, type_of_column(files, place, dtypes or {})) for name, place in places.items()]
    return CsvStream(paths, open_records, _Columns(names, columns, has_header=header is None), errors)


class CsvStream(Stream):
    """Rows of CSV files, one after another."""

    def __init__(
        self, paths: list[str], open_records: Callable[..., CsvRecords], columns: _Columns, errors: Errors
    ) -> None:
        super().__init__([Shard(path) for path in paths], errors=errors)
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._open_records = open_records
        self._columns = columns

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield every `step`-th row of a shard, from row `first` on, the header and blank lines not counted."""
        columns = self._columns
        ahead = first  # rows to pass over until the next that is wanted
        with contextlib.closing(self._open_records(path=shard.name)) as records:
            if columns.has_header:
                header = records.read()
                if header is None:
                    return
                columns.check_header(header, shard.name)
            while lines := records.next_lines():
                try:
                    samples = columns.samples(*records.rows(lines, ahead, step))
                except ValueError:  # blank lines, values of several lines, something broken
                    ahead = yield from self._read_one_by_one(shard, records, len(lines), ahead, step)
                    continue
                records.skip(lines)
                yield from samples
                ahead = ahead - len(lines) if ahead >= len(lines) else (ahead - len(lines)) % step

    def _read_one_by_one(
        self, shard: Shard, records: CsvRecords, lines: int, ahead: int, step: int
    ) -> Generator[Sample | RecordError, None, int]:
        """Yield the rows that begin in the next lines; return how many to pass over behind them."""
        stop = records.next_number + lines
        while records.next_number < stop and (row := records.read()) is not None:
            if ahead:
                ahead -= 1
                continue
            ahead = step - 1
            try:
                if isinstance(row, ValueError):
                    raise row
                yield self._columns.samples([row], False)[0]
            except ValueError as error:
                yield RecordError(shard.name, records.offset, f"line {records.number}", str(error))
        return ahead


class _Columns:
    """The chosen columns: (name in the sample, place in a row, type)."""

    def __init__(self, names: list[str], chosen: list[tuple[str, int, str]], *, has_header: bool) -> None:
        self.has_header = has_header
        self.names = names
        self._chosen = chosen
        self._are_floats = chosen == [(name, at, "float64") for at, name in enumerate(names)]

    def samples(self, rows: list[list[str]], is_plain: bool) -> list[Sample]:
        """Return the samples of some rows, given their values, and whether all are ASCII without underscores.

        Raises:
            ValueError: one of them is broken; the message is the reason if it is the only one.
        """
        if not {*map(len, rows)} <= {len(self.names)}:
            raise ValueError(f"it has {len(rows[0])} values, the header {len(self.names)}")
        if self._are_floats and is_plain:
            with contextlib.suppress(ValueError):  # an empty value, which is NaN, or a wrong one
                return [dict(zip(self.names, map(float, row), strict=True)) for row in rows]
        cells = list(zip(*rows, strict=True)) or [()] * len(self.names)
        columns = []
        for _, at, kind in self._chosen:
            try:
                columns.append(_parse_column(kind, cells[at], is_plain))
            except (ValueError, KeyError, FloatingPointError):
                raise ValueError(
                    f"column {self.names[at]!r} has {cells[at][0][:40]!r}, which is no {kind}; dtypes= sets another"
                ) from None
        return samples_of([name for name, _, _ in self._chosen], columns)

    def check_header(self, header: list[str] | ValueError, path: str) -> None:
        """Raise RecordError if a file's header is not the first one's."""
        if isinstance(header, ValueError):
            raise RecordError(path, 0, "header", str(header)) from header
        if header != self.names:
            names = str(header)[:200]
            raise RecordError(path, 0, "header", f"its columns are {names}, the first file's {self.names}")


def _parse_column(kind: str, cells: Sequence[str], is_plain: bool) -> Sequence[Any]:
    """Return the values of some cells.

    Raises:
        ValueError: one is none of its column's. (KeyError: if of a bool. FloatingPointError: if too large for a float.)
    """
    if kind == "text":
        return cells
    if kind == "bool":
        return [BOOLS[cell] for cell in cells]
    text = "" if is_plain else "".join(cells)
    if not text.isascii() or "_" in text:  # Python's int and float read "1_000", and digits of all scripts
        raise ValueError("a value is no number")
    if kind in _FLOATS:
        try:
            values: list[Any] = list(map(float, cells))
        except ValueError:
            values = [float(cell or "nan") for cell in cells]
        with np.errstate(over="raise"):  # what the type has as infinity only
            return values if kind == "float64" else list(map(np.dtype(kind).type, values))
    values = list(map(int, cells))
    limits = np.iinfo(kind)
    if values and not (limits.min <= min(values) and max(values) <= limits.max):
        raise ValueError(f"a value does not fit into {kind}")
    return values if kind == "int64" else list(map(np.dtype(kind).type, values))


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


def concat_files(parts: Sequence[str], path: str) -> None:
    """Make one file of several that CsvWriter made, in their order; the header is the first one's."""
    whole = SequentialWriter(path)
    try:
        for number, part in enumerate(parts):
            with contextlib.closing(SequentialReader(Storage(), part)) as pieces:
                if number:
                    pieces.skip(_header_nbytes(part))
                while piece := pieces.take(READ_NBYTES):
                    whole.write(piece)
    finally:
        whole.close()


def _header_nbytes(path: str) -> int:
    """Return the bytes of a header that CsvWriter wrote: whatever the delimiter is, its quotes come in pairs."""
    nbytes = quotes = 0
    with contextlib.closing(blocks(Storage(), path, LONGEST)) as read:
        for line in itertools.chain.from_iterable(block.lines for block in read):
            nbytes += len(line)
            quotes += line.count(b'"')
            if quotes % 2 == 0:
                break
    return nbytes
