"""What the columns of a set of CSV files hold, as their first rows show.

    looked at    the first 1000 rows (of 8 MiB) of the first 8 files, and of more where none of these has rows
    in a file    what all of a column's values are: int64, float64 (an empty one is NaN), bool (true, false), or text.
                 Values in quotes are text
    in a set     int64 and float64 are float64 together, and so are int64 and a file in which all values are empty; an
                 integer that float64 does not hold is refused. For all others, the first file decides that has a value

What comes later and is not of its column's type is a broken row: files are not read twice.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.errors import SourceError
from penstock.data.formats.text.csv_records import CsvRecords

MAX_PROBED_ROWS = 1000
"""Of a file."""
MAX_PROBED_FILES = 8
"""Of a set, if one of them has rows."""

_MAX_PROBED_NBYTES = 8 << 20
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|nan|inf|infinity)", re.I)
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

_Values = Sequence[str | None]
"""Of a column; None is one that has quotes."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The beginning of a file."""

    path: str
    names: list[str]
    columns: list[_Values]
    """By place; none where the file has no rows."""


def probe_files(
    paths: Sequence[str], open_records: Callable[..., CsvRecords], header: Sequence[str] | None
) -> list[FirstRows]:
    """Return the beginnings of files, as many as it takes to know their columns; those without a header are left out.

    A later file that cannot be read, or has another header, is left for its reader to say so.

    Raises:
        SourceError: the first file cannot be read, or no file has a header.
    """
    found: list[FirstRows] = []
    for number, path in enumerate(paths):
        if number >= MAX_PROBED_FILES and any(one.columns for one in found):
            break
        try:
            with contextlib.closing(open_records(path=path)) as records:
                first = _first_rows(records, path, header)
        except SourceError:
            if not found:
                raise
            continue
        if first is not None and (not found or first.names == found[0].names):
            found.append(first)
    if not found:
        raise SourceError(f"{paths[0]} has no header; it is empty" + (", and so are the others" * (len(paths) > 1)))
    return found


def _first_rows(records: CsvRecords, path: str, header: Sequence[str] | None) -> FirstRows | None:
    first = header if header is not None else records.read()
    if first is None:
        return None
    if isinstance(first, ValueError):
        raise SourceError(f"{path}: the header cannot be read: {first}") from first
    names = [str(name) for name in first]
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise SourceError(f"{path} has {times} columns {name[:80]!r}; pass header= with names that differ")
    found: list[list[str | None]] = []
    for _ in range(MAX_PROBED_ROWS):
        row = records.read()
        if row is None or records.offset > _MAX_PROBED_NBYTES:
            break
        if not isinstance(row, ValueError) and len(row) == len(names):
            found.append(records.bare_values(row))
    return FirstRows(path, names, list(zip(*found, strict=True)))


def type_of_column(files: Sequence[FirstRows], place: int, known: Mapping[str, str]) -> str:
    """Return what a column holds in all of these files: what `known` says of its name, or what their rows show.

    Raises:
        SourceError: it has fractions or empty values in one file, and in another an integer that float64 does not hold.
    """
    name = files[0].names[place]
    if name in known:
        return known[name]
    columns = {one.path: one.columns[place] for one in files if one.columns}
    types = {path: infer_type(values) for path, values in columns.items() if any(value != "" for value in values)}
    first = next(iter(types.values()), "text")
    if first == "bool" and len(types) < len(columns):  # as within a file
        return "text"
    numbers = {*types.values()}
    if not numbers <= {"int64", "float64"} or (numbers == {"int64"} and len(types) == len(columns)):
        return first
    for path, type in types.items():
        wide = next((value for value in columns[path] if type == "int64" and value and _is_wide(value)), None)
        if wide is not None:
            other = next(one for one in columns if types.get(one) != "int64")
            raise SourceError(
                f"{path}: column {name!r} has {wide}, which float64 does not hold, and {other} has fractions or empty "
                f"values there; say what it is: dtypes={{{name!r}: 'text'}}"
            )
    return "float64" if numbers else "text"


def infer_type(values: _Values) -> str:
    """Return what all these values are; None is one that has quotes.

    >>> infer_type(["1", "-2"]), infer_type(["1", ""]), infer_type(["true"]), infer_type(["1", "x"])
    ('int64', 'float64', 'bool', 'text')
    """
    if None in values:
        return "text"
    bare = [value for value in values if value is not None]
    if all(_INT.fullmatch(value) for value in bare):
        return "int64" if all(len(value) < 19 or _fits_int64(value) for value in bare) else "text"
    if all(value in BOOLS for value in bare):
        return "bool"
    if any(bare) and all(not value or _FLOAT.fullmatch(value) for value in bare):
        return "float64"
    return "text"


def _fits_int64(value: str) -> bool:
    return len(value) <= 20 and -(1 << 63) <= int(value) < 1 << 63


def _is_wide(value: str) -> bool:
    return len(value) > 15 and float(value) != int(value)
