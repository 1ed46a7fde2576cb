"""What the columns of a set of CSV files hold, and the values of each.

    looked at    whole files, up to 256 MiB of a set (64 MiB of remote files); of larger sets as much of each file as is
                 its share, 8 MiB at least, until these bytes are read
    a column     is what all its values are: int64, float64 (an empty one is NaN), bool (true, false), or text. An
                 integer that float64 does not hold beside fractions is refused

What comes later and is not of its column's type is a broken row: files are not read twice.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.formats.text.csv_rows import CsvRows
from penstock.data.optional import need
from penstock.data.storage.storage import is_remote

_LOOKED_AT_NBYTES = 256 << 20
_LOOKED_AT_REMOTELY_NBYTES = 64 << 20
_LEAST_NBYTES = 8 << 20
"""Of a file of a large set."""

_BOOLS = ("true", "True", "TRUE", "false", "False", "FALSE")
_LONG_INT = r"^-?[0-9]{16,}$"
_EXACT = 1 << 53
"""Up to here float64 has all integers."""


@dataclass(slots=True)
class Column:
    """What has been seen of a column."""

    has_values: bool = False
    has_empty: bool = False
    is_int: bool = True
    is_float: bool = True
    is_bool: bool = True
    wide: str = ""
    """An integer that float64 does not hold, and the file that has it."""
    wide_in: str = ""

    def add(self, values: Any, path: str) -> None:
        """Look at some more values, as text, of a file."""
        arrow, compute = need("pyarrow", "parquet"), need("pyarrow.compute", "parquet")
        there = compute.not_equal(values, "")
        if not compute.all(there, min_count=0).as_py():
            self.has_empty, values = True, values.filter(there)
        if not len(values):
            return
        self.has_values = True
        numbers = None
        if self.is_int:
            numbers = _cast(values, arrow.int64())
            is_hex = numbers is not None and compute.any(compute.match_substring(values, "x", ignore_case=True)).as_py()
            self.is_int = numbers is not None and not is_hex
            self.is_float = self.is_float and not is_hex
        if self.is_float and not self.is_int:
            numbers = _cast(values, arrow.float64())
            self.is_float = numbers is not None
        if numbers is not None and self.is_float and max(map(abs, compute.min_max(numbers).as_py().values())) >= _EXACT:
            self._add_long(values.filter(compute.match_substring_regex(values, _LONG_INT)).to_pylist(), path)
        self.is_bool = self.is_bool and values[0].as_py() in _BOOLS and _are_bools(values)

    def _add_long(self, values: list[str], path: str) -> None:
        """Look at integers that float64 may not hold."""
        if any(not -(1 << 63) <= int(value) < 1 << 63 for value in values):
            self.is_int = self.is_float = False
        wide = next((value for value in values if float(value) != int(value)), "")
        if wide and not self.wide:
            self.wide, self.wide_in = wide, path

    def kind(self, name: str) -> str:
        """Return the type that holds all values.

        Raises:
            SourceError: there is none.
        """
        if not self.has_values:
            return "text"
        if self.is_int and not self.has_empty:
            return "int64"
        if self.is_int or self.is_float:
            if self.wide:
                raise SourceError(
                    f"{self.wide_in}: column {name!r} has {self.wide}, which float64 does not hold, and fractions or "
                    f"empty values; say what it is: dtypes={{{name!r}: 'text'}}"
                )
            return "float64"
        return "bool" if self.is_bool and not self.has_empty else "text"


def look_at(rows: CsvRows, paths: Sequence[str], known: Container[str]) -> tuple[list[str], dict[str, Column]]:
    """Return the names of a set's columns, and what was seen of those that are not known.

    A later file that cannot be read, or has another header, is left for its reader to say so.

    Raises:
        SourceError: the first file cannot be read, or no file has a header.
    """
    names, seen = None, dict[str, Column]()
    left = _LOOKED_AT_REMOTELY_NBYTES if is_remote(paths[0]) else _LOOKED_AT_NBYTES
    share = max(_LEAST_NBYTES, left // len(paths))
    for path in paths:
        if names is None:
            names = rows.names(path)
            seen = {name: Column() for name in names or () if name not in known}
        if names is not None and left > 0:
            nbytes = 0
            with suppress(SourceError), closing(rows.batches(path, names, dict.fromkeys(seen, "bytes"))) as batches:
                for batch in batches:
                    if isinstance(batch, RecordError):
                        continue
                    for name, column in seen.items():
                        if column.is_int or column.is_float or column.is_bool:
                            column.add(_text(batch.column(name)), path)
                    nbytes += batch.nbytes
                    if nbytes > share:
                        break
            left -= nbytes
    if names is None:
        raise SourceError(f"{paths[0]} has no header; it is empty" + (", and so are the others" * (len(paths) > 1)))
    return names, seen


def _text(column: Any) -> Any:
    arrow = need("pyarrow", "parquet")
    try:
        return column.cast(arrow.string())
    except arrow.ArrowInvalid:  # some rows are no UTF-8, and broken
        values = (value.decode(errors="ignore") for value in column.to_pylist())
        return arrow.array([value or "?" for value in values], arrow.string())


def _cast(values: Any, type: Any) -> Any:
    """Return values as numbers; None if one of them is none, which is found soon in a column of text."""
    with suppress(need("pyarrow", "parquet").ArrowInvalid):
        return values.cast(type)
    return None


def _are_bools(values: Any) -> bool:
    arrow, compute = need("pyarrow", "parquet"), need("pyarrow.compute", "parquet")
    return bool(compute.all(compute.is_in(values, value_set=arrow.array(_BOOLS))).as_py())


def convert(column: Any, kind: str) -> Sequence[Any] | np.ndarray:
    """Return the values of a column of bytes, of text, or of floats with nulls.

    Raises:
        ValueError: one of them is none of this kind.
    """
    arrow, compute = need("pyarrow", "parquet"), need("pyarrow.compute", "parquet")
    if arrow.types.is_floating(column.type):
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    text = column if arrow.types.is_string(column.type) else column.cast(arrow.string())
    if kind == "text":
        return text.to_pylist()  # type: ignore[no-any-return]
    if kind == "bool":
        if len(text) and not _are_bools(text):
            raise ValueError("it is neither true nor false")
        return [value in _BOOLS[:3] for value in text.to_pylist()]
    if kind.startswith("float"):
        there = compute.not_equal(text, "")
        filled = text if compute.all(there, min_count=0).as_py() else compute.if_else(there, text, "nan")
        floats = filled.cast(arrow.float64()).to_numpy()
        if kind == "float64":
            return floats.tolist()  # type: ignore[no-any-return]
        with np.errstate(over="ignore"):
            made = floats.astype(kind)
        if (np.isinf(made) & np.isfinite(floats)).any():
            raise ValueError("it is too large")
        return made  # type: ignore[no-any-return]
    if compute.any(compute.match_substring(text, "x", ignore_case=True), min_count=0).as_py():  # Arrow reads 0x1F
        raise ValueError("it is no decimal number")
    ints = text.cast(getattr(arrow, kind)()).to_numpy()
    return ints.tolist() if kind == "int64" else ints  # type: ignore[no-any-return]
