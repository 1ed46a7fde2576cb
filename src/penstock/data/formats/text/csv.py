"""CSV and TSV: a header, and rows of text that columns make numbers of. Plain or gzip.

    header       the first record; its names are the fields. `header=` gives them where a file has none
    delimiter    a comma; a tab where the name has .tsv; or `delimiter=`
    quotes       a value that begins with " ends at the next single "; it may hold delimiters and line feeds, and "" is
                 one ". Elsewhere a " is a character as others are (RFC 4180, as Python's csv reads it)
    lines        end at a line feed, a carriage return, or both; files may mix them
    blank        a line of white space only is no record, outside of quotes
    columns      what all values in the first 1000 rows are: int64, float64 (an empty one is NaN), bool (true, false),
                 or text. `dtypes=` overrides it. QuotedText values are text, so that "12" stays one. Numbers are of
                 ASCII digits: 1_000 and Arabic digits are none, though Python takes them

A row with more or fewer values than the header, or a value that is none of its column's, is broken, and the next row is
read. `CsvWriter` quotes all text, so that what it wrote comes back with the types that it had.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.text.csv_records import CsvRecord, QuotedText, RecordSplitter
from penstock.data.formats.text.lines import LONGEST, Block, blocks
from penstock.data.sample_batch import samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection, fitted
from penstock.data.storage.sequential_reader import READ_NBYTES, SequentialReader
from penstock.data.storage.sequential_writer import SequentialWriter
from penstock.data.storage.storage import Storage
from penstock.data.stream import Shard, Stream

MAX_PROBED_ROWS = 1000
"""Rows from which the columns' types are inferred."""

_MAX_PROBED_NBYTES = 8 << 20
_KINDS = ("text", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_FLOATS = ("float16", "float32", "float64")
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|nan|inf|infinity)", re.I)
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
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
        paths: the files; each is a shard, and all have the first one's header.
        storage: opens them.
        fields: which columns are read.
        errors: what to do with a row that is broken.
        dtypes: {column: dtype} for columns that are not what their first rows seem to be: "float32", "int8", "text" ...
        delimiter: one character between values.
        header: the columns' names, if the files have no header.
        max_record_nbytes: a longer row is broken.

    Raises:
        SourceError: the first file cannot be opened, or has no header.
        OptionError: a dtype is unknown, or the delimiter has several characters.
    """
    if delimiter is None:
        delimiter = "\t" if ".tsv" in paths[0].lower().rpartition("/")[2] else ","
    if len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise OptionError(f"delimiter={delimiter!r} has to be one ASCII character, and no quote")
    rows = RecordSplitter(storage, delimiter, max_record_nbytes)
    names, kinds = _probe_columns(rows, paths[0], header)
    for name, kind in (dtypes or {}).items():
        if name not in names:
            raise SourceError(f"{paths[0]} has no column {name!r}; it has {', '.join(map(repr, names))}")
        if kind not in (*_KINDS, *_FLOATS):
            raise OptionError(f"dtypes[{name!r}] is {kind!r}; it has to be one of {', '.join((*_KINDS, *_FLOATS))}")
        kinds[names.index(name)] = kind
    own = fields.names(names, paths[0])
    columns = [(name, names.index(there), kinds[names.index(there)]) for name, there in own.items()]
    return CsvStream(paths, rows, _Columns(names, columns, has_header=header is None), errors)


class CsvStream(Stream):
    """Rows of CSV files, one after another."""

    def __init__(self, paths: list[str], rows: RecordSplitter, columns: _Columns, errors: Errors) -> None:
        super().__init__([Shard(path) for path in paths], errors=errors)
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._rows = rows
        self._columns = columns

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield every `step`-th row of a shard, from row `first` on, the header and blank lines not counted."""
        columns = self._columns
        sample = columns.sample_parser()
        ahead = first  # rows to pass over until the next that is wanted
        with contextlib.closing(self._read(shard.name)) as found:
            for block in found:
                if isinstance(block, Block):
                    count = len(block.lines)
                    samples = columns.samples(block.lines, self._rows.delimiter, ahead, step)
                    if samples is not None:
                        yield from samples
                        ahead = ahead - count if ahead >= count else (ahead - count) % step
                        continue
                for row in self._rows.records_of(block) if isinstance(block, Block) else (block,):
                    if ahead:
                        ahead -= 1
                        continue
                    ahead = step - 1
                    try:
                        yield sample(row.values())
                    except ValueError as error:
                        yield RecordError(shard.name, row.offset, f"line {row.number}", str(error))

    def _read(self, path: str) -> Generator[CsvRecord | Block, None, None]:
        """Yield what holds a file's rows, without the header."""
        columns = self._columns
        found = self._rows.read(path, len(columns.names))
        if not columns.has_header:
            yield from found
            return
        block, records = next(found, None), list[CsvRecord]()
        if isinstance(block, Block):
            block, *records = self._rows.records_of(block)
        columns.check_header(block, path)
        yield from records
        yield from found


def _probe_columns(rows: RecordSplitter, path: str, header: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the names and the types of a file's columns."""
    with contextlib.closing(rows.read_records(path)) as records:
        try:
            first = list(header) if header is not None else next(records).values()
            names = [str(name) for name in first]
            found: list[list[str]] = []
            for row in itertools.islice(records, MAX_PROBED_ROWS):
                if row.offset > _MAX_PROBED_NBYTES:
                    break
                try:
                    values = row.split_values()
                except ValueError:
                    continue
                if len(values) == len(names):
                    found.append(values)
        except StopIteration:
            raise SourceError(f"{path} has no header; it is empty") from None
        except SourceError:
            raise
        except ValueError as error:
            raise SourceError(f"{path}: the header cannot be read: {error}") from error
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise SourceError(f"{path} has {times} columns {name[:80]!r}; pass header= with names that differ")
    return names, [_infer_type(list(column)) for column in zip(*found, strict=True)] or ["text"] * len(names)


def _infer_type(values: list[str]) -> str:
    """Return what all these values are.

    >>> _infer_type(["1", "-2"]), _infer_type(["1", ""]), _infer_type(["true"]), _infer_type(["1", "x"])
    ('int64', 'float64', 'bool', 'text')
    """
    if any(isinstance(value, QuotedText) for value in values):
        return "text"
    if all(_INT.fullmatch(value) for value in values):
        return "int64" if all(len(value) < 19 or _fits_int64(value) for value in values) else "text"
    if all(value in _BOOLS for value in values):
        return "bool"
    if any(values) and all(not value or _FLOAT.fullmatch(value) for value in values):
        return "float64"
    return "text"


def _fits_int64(value: str) -> bool:
    return len(value) <= 20 and -(1 << 63) <= int(value) < 1 << 63


class _Columns:
    """The chosen columns: (name in the sample, place in a row, type)."""

    def __init__(self, names: list[str], chosen: list[tuple[str, int, str]], *, has_header: bool) -> None:
        self.has_header = has_header
        self.names = names
        self._chosen = chosen
        self._are_floats = chosen == [(name, at, "float64") for at, name in enumerate(names)]

    def samples(self, lines: list[bytes], delimiter: str, ahead: int, step: int) -> list[Sample] | None:
        """Return the samples of every `step`-th line, from line `ahead` on; None if one of them may be broken.

        Args:
            lines: without quotes, each with as many values as there are columns.
            delimiter: between values.
            ahead: lines to pass over.
            step: how many there are to the next one.
        """
        try:
            if len(lines) <= ahead:
                return []
            text = delimiter.encode().join(lines[ahead::step]).decode()
            cells = text.split(delimiter)
            if self._are_floats and _is_plain(text):
                values = map(float, cells)
                return [
                    dict(zip(self.names, row, strict=True)) for row in zip(*[values] * len(self.names), strict=True)
                ]
            columns = [_parse_column(kind, cells[at :: len(self.names)]) for _, at, kind in self._chosen]
        except ValueError:
            return None
        return samples_of([name for name, _, _ in self._chosen], columns)

    def check_header(self, header: CsvRecord | None, path: str) -> None:
        """Raise RecordError if a file's header is not the first one's."""
        try:
            names = [] if header is None else header.values()
        except ValueError as error:
            raise RecordError(path, 0, "header", str(error)) from error
        if names != self.names:
            raise RecordError(path, 0, "header", f"its columns are {str(names)[:200]}, the first file's {self.names}")

    def sample_parser(self) -> Callable[[list[str]], Sample]:
        """Return a function from a row's values to a sample; it raises ValueError for broken ones."""
        count = len(self.names)
        chosen = [(name, at, partial(_parse, kind)) for name, at, kind in self._chosen]
        numbers = [at for _, at, kind in self._chosen if kind != "text"]
        quick = [(name, at, float if kind == "float64" else _PARSERS[kind]) for name, at, kind in self._chosen]

        def sample(values: list[str]) -> Sample:
            if len(values) != count:
                raise ValueError(f"it has {len(values)} values, the header {count}")
            text = "".join(values)
            if (text.isascii() and "_" not in text) or _is_plain("".join([values[at] for at in numbers])):
                with contextlib.suppress(ValueError):  # an empty value that is NaN, or a wrong one
                    return {name: parse(values[at]) for name, at, parse in quick}
            try:
                return {name: parse(values[at]) for name, at, parse in chosen}
            except ValueError:
                raise ValueError(self._why(values)) from None

        return sample

    def _why(self, values: list[str]) -> str:
        for _, at, kind in self._chosen:
            try:
                _parse(kind, values[at])
            except ValueError:
                return f"column {self.names[at]!r} has {values[at][:40]!r}, which is no {kind}; dtypes= sets another"
        return "it is broken"


def _parse_column(kind: str, values: list[str]) -> list[Any]:
    """Return values, as `_parse` does for each."""
    if kind == "text":
        return values
    if not _is_plain("".join(values)):
        raise ValueError("a value is no number")
    if kind == "float64":
        with contextlib.suppress(ValueError):  # an empty value, which is NaN
            return list(map(float, values))
    return list(map(_PARSERS[kind], values))


def _is_plain(value: str) -> bool:
    return value.isascii() and "_" not in value


def _parse(kind: str, value: str) -> Any:
    """Return a value of any text. Python's int and float would read "1_000", and digits of all scripts."""
    if kind != "text" and not _is_plain(value):
        raise ValueError(f"{value!r} is no number")
    return _PARSERS[kind](value)


def _parse_float(value: str) -> float:
    return float(value) if value else float("nan")


def _parse_bool(value: str) -> bool:
    try:
        return _BOOLS[value]
    except KeyError as error:
        raise ValueError(f"{value!r} is neither true nor false") from error


def _parser(kind: str) -> Callable[[str], Any]:
    if kind == "text":
        return str
    if kind == "bool":
        return _parse_bool
    if kind == "float64":
        return _parse_float
    dtype = np.dtype(kind)
    if dtype.kind == "f":
        return lambda value: dtype.type(_parse_float(value))
    limits = np.iinfo(dtype)
    smallest, largest = int(limits.min), int(limits.max)

    def parse_int(value: str) -> Any:
        number = int(value)
        if not smallest <= number <= largest:
            raise ValueError(f"{value} is not between {smallest} and {largest}")
        return number if kind == "int64" else dtype.type(number)

    return parse_int


_PARSERS = {kind: _parser(kind) for kind in (*_KINDS, *_FLOATS)}


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
    """Return the bytes of a header that CsvWriter wrote: its quotes come in pairs."""
    nbytes = quotes = 0
    with contextlib.closing(blocks(Storage(), path, 1 << 30)) as pieces:
        for line in itertools.chain.from_iterable(block.lines for block in pieces):
            nbytes += len(line) + 1
            quotes += line.count(b'"')
            if quotes % 2 == 0:
                break
    return nbytes
