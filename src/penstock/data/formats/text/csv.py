"""CSV and TSV, read by pyarrow: a header, and rows of text that columns make numbers of. Plain, or packed.

    header       the first row; its names are the fields. `header=` gives them where a file has none
    delimiter    that of , tab ; and | which makes as many values of each of the first rows; or `delimiter=`
    quotes       a value that begins with " ends at the next single "; it may hold delimiters and line feeds, and "" is
                 one ". `quoting=False` has " as a character as others are
    columns      what all values of a column are: int64, float64 (an empty one is NaN), bool (true, false), or text.
                 Whole files are looked at, as far as `csv_types` says. `dtypes=` overrides it
    files        all have the first one's header; one without any, as it is empty, has no rows

A row with more or fewer values than the header, or a value that is none of its column's, is broken, and the next row is
read.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.partition_names import check_left_out
from penstock.data.formats.text.csv_rows import CsvRows
from penstock.data.formats.text.csv_types import convert, look_at
from penstock.data.formats.text.lines import LONGEST, blocks
from penstock.data.optional import need
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
    rows = CsvRows(storage, None if header is None else tuple(header), quoting, max_record_nbytes)
    if delimiter is None:
        delimiter = rows.choose_delimiter(paths[0])
    if len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise OptionError(f"delimiter={delimiter!r} has to be one ASCII character, and no quote")
    rows = replace(rows, delimiter=delimiter)
    known = dtypes or {}
    names, seen = look_at(rows, paths, known)
    for name, kind in known.items():
        if name not in names:
            raise SourceError(f"{paths[0]} has no column {name!r}; it has {', '.join(map(repr, names))}")
        if kind not in (*_KINDS, *_FLOATS):
            raise OptionError(f"dtypes[{name!r}] is {kind!r}; it has to be one of {', '.join((*_KINDS, *_FLOATS))}")
    check_left_out(paths, lambda: names, fields, "open each folder alone, to add {} by map()")
    chosen = fields.names(names, paths[0])
    kinds = {own: known.get(own) or seen[own].kind(own) for own in chosen.values()}
    return CsvStream(paths, rows, names, chosen, kinds, errors)


class CsvStream(Stream):
    """Rows of CSV files, one after another."""

    def __init__(
        self,
        paths: list[str],
        rows: CsvRows,
        names: list[str],
        chosen: dict[str, str],
        kinds: dict[str, str],
        errors: Errors,
    ) -> None:
        super().__init__([Shard(path) for path in paths], errors=errors)
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._rows = rows
        self._names = names
        self._chosen = chosen
        self._kinds = kinds
        """By the columns' own names."""

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield every `step`-th row of a shard, from row `first` on, the header and blank lines not counted."""
        number = 0  # of the next row
        with contextlib.closing(self._rows.batches(shard.name, self._names, self._kinds)) as batches:
            for batch in batches:
                if isinstance(batch, RecordError):
                    if number >= first and (number - first) % step == 0:
                        yield batch
                    number += 1
                    continue
                begin = (first - number) % step if number >= first else first - number
                if step > 1 or begin:
                    wanted = np.arange(begin, batch.num_rows, step)
                    yield from self._samples(shard.name, batch.take(wanted), number + wanted)
                else:
                    yield from self._samples(shard.name, batch, range(number, number + batch.num_rows))
                number += batch.num_rows

    def _samples(self, path: str, table: Any, numbers: Iterable[int]) -> Iterator[Sample | RecordError]:
        try:
            columns = {own: convert(table.column(own), kind) for own, kind in self._kinds.items()}
        except ValueError:
            for at, number in enumerate(numbers):
                yield self._sample(path, table.slice(at, 1), number)
        else:
            yield from samples_of([*self._chosen], [columns[own] for own in self._chosen.values()])

    def _sample(self, path: str, row: Any, number: int) -> Sample | RecordError:
        sample: Sample = {}
        for name, own in self._chosen.items():
            try:
                (sample[name],) = convert(row.column(own), self._kinds[own])
            except ValueError as error:
                value = row.column(own)[0].as_py()[:40].decode(errors="replace")
                reason = f"column {own!r} has {value!r}, which is no {self._kinds[own]} ({error}); dtypes= sets another"
                return RecordError(path, -1, f"row {number + 1}", reason)
        return sample


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
