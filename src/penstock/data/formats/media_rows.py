"""`MediaRows`: a table that names a file in each row, as one beside a folder of images or recordings does.

    media="train.csv"       any file that `penstock.open` reads: CSV, TSV, JSON, JSON lines, Parquet ...
    media=rows              a source, a stream, or a list of dicts
    media="instances.json"  COCO's: a row for each of its images, with all that the file says of it ("id" is
                            "image_id"), and of its annotations, one after another:
                                boxes       float32 (n, 4): left, top, right, bottom, in pixels
                                labels      int64 (n,): category_id
                                others      as they are called there: arrays of numbers, or lists

A value names the file whose path ends on it, with the file's suffix or without. A row that names no file, or several,
is an error; files that no row names are left out, with a warning.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.paths import NamedPaths, Paths
from penstock.data.optional import need
from penstock.data.schema import Field, field_of

Table = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
_SHOWN = 3


class MediaRows:
    """The rows, column by column.

    Args:
        table: where they come from, for messages.
        rows: all of the same fields.
        column: which of them names the file; None for the only one whose values do.

    Raises:
        SourceError: there are no rows, they differ in their fields, or none is called `column`.
    """

    def __init__(self, table: str, rows: Sequence[Mapping[str, Any]], column: str | None) -> None:
        self.table = table
        if not rows:
            raise SourceError(f"{table} has no rows")
        names = [*rows[0]]
        other = next((number for number, row in enumerate(rows) if row.keys() != rows[0].keys()), None)
        if other is not None:
            raise SourceError(
                f"row {other} of {table} has the fields {sorted(rows[other])}, and the first one {sorted(names)}; pass "
                "rows with the same ones: media=[...]"
            )
        if column is not None and column not in names:
            raise SourceError(f"{table} has no column {column!r}; it has {', '.join(map(repr, names))}")
        self.columns = {name: _packed([row[name] for row in rows]) for name in names}
        """By name: an array, or a sequence of what each row has."""
        self.column = column
        """Which names the file."""

    def locate(self, paths: Sequence[str], where: str) -> list[int]:
        """Return which of some paths each row names.

        Raises:
            SourceError: a row names none, or several; or it is not clear which column names files.
        """
        found = NamedPaths(paths)
        if self.column is None:
            fit = [name for name, values in self.columns.items() if all(map(found.by_name, values))]
            if len(fit) != 1:
                said = f"the columns {', '.join(map(repr, fit))} all do" if fit else "no column does in each row"
                raise SourceError(
                    f"which column of {self.table} names the files of {where}? {said}; pass column=, one of "
                    f"{', '.join(map(repr, self.columns))}"
                )
            self.column = fit[0]
        numbers = [found.by_name(value) for value in self.columns[self.column]]
        for count, words in ((0, "names no file of"), (2, "names several files of")):
            wrong = [at for at, each in enumerate(numbers) if min(len(each), 2) == count]
            if wrong:
                values = ", ".join(repr(self.columns[self.column][at]) for at in wrong[:_SHOWN])
                raise SourceError(
                    f"{len(wrong)} of the {len(numbers)} rows of {self.table} have a {self.column!r} that {words} "
                    f"{where}: {values}; name another with column=, or pass the rows that count: "
                    "media=[row for row in ...]"
                )
        left_out = len(paths) - len({each[0] for each in numbers})
        if left_out:
            warnings.warn(
                f"left out: {left_out} of the {len(paths)} files of {where}, which no row of {self.table} names",
                stacklevel=2,
            )
        return [each[0] for each in numbers]

    def value(self, name: str, number: int) -> Any:
        """Return what a row has in a column."""
        found = self.columns[name][number]
        return found.item() if isinstance(found, np.generic) else found

    def field(self, name: str) -> Field:
        """Return what a column holds, as its first value shows."""
        try:
            return field_of(self.value(name, 0))
        except SourceError:
            return Field("object")


def read_rows(media: Table, folder: str, column: str | None, open_table: Callable[[str], Any]) -> MediaRows:
    """Return the rows of what a user passes as `media=`.

    Args:
        media: a path, from here or from `folder`; or the rows.
        folder: where the files lie.
        column: names the files.
        open_table: `penstock.open`.

    Raises:
        SourceError: the table cannot be read.
    """
    if not isinstance(media, str | os.PathLike):
        return MediaRows(getattr(media, "where", "media="), [*media], column)
    path = os.fspath(media)
    beside = os.path.join(folder, path)
    path = beside if not os.path.exists(path) and os.path.exists(beside) else path
    if path.lower().endswith(".json") and os.path.exists(path):
        with open(path, "rb") as file:
            try:
                found = need("orjson", "jsonl").loads(file.read())
            except ValueError:  # lines, perhaps
                found = None
        if isinstance(found, dict) and isinstance(found.get("images"), list):
            return _of_coco(path, found, column)
    return MediaRows(path, [*open_table(path)], column)


def _of_coco(path: str, found: dict[str, Any], column: str | None) -> MediaRows:
    try:
        annotations: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for one in found.get("annotations", []):
            annotations[one["image_id"]].append(one)
        names = sorted({name for one in found.get("annotations", []) for name in one} - {"id", "image_id"})
        rows = []
        for image in found["images"]:
            own = annotations[image["id"]]
            row = {"image_id" if name == "id" else name: value for name, value in image.items()}
            for name in names:
                row |= _annotated(name, [one.get(name) for one in own])
            rows.append(row)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise SourceError(f"{path} has images and annotations, and is not as COCO's: {error!r}") from error
    return MediaRows(path, rows, column or "file_name")


def _annotated(name: str, values: list[Any]) -> dict[str, Any]:
    if name == "bbox":
        boxes = np.array(values, np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return {"boxes": boxes}
    if name == "category_id":
        return {"labels": np.array(values, np.int64)}
    if all(isinstance(value, int | float) for value in values):
        return {name: np.array(values, np.float64 if name == "area" else None)}
    return {name: values}


def _packed(values: list[Any]) -> Sequence[Any]:
    """Return a column in few objects: what workers inherit, or are sent."""
    kinds = {*map(type, values)}
    if kinds == {str}:
        return Paths("", values)
    if kinds in ({int}, {float}, {bool}):
        made: Any = np.array(values)
        return made if made.dtype.kind in "ifb" else values
    return values
