"""Hive partitions: columns that are in the names of folders, as in year=2026/label=cat/a.parquet, and not in the files.

Spark, pandas (partition_cols=) and polars write them. They are read where they are asked for, as int64 if all values of
a column are integers, else as text; `__HIVE_DEFAULT_PARTITION__` is null.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from penstock.core.errors import SourceError
from penstock.data.formats.arrow.columns import Column
from penstock.data.formats.arrow.types import Leaf, leaves
from penstock.data.optional import need
from penstock.data.schema import Selection

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True, slots=True)
class PartitionLeaf(Leaf):
    """A field that has one value in all rows of a file."""

    value: int | str | None = None

    def column(self, batch: Any) -> Column:
        """Return the value as often as a record batch has rows."""
        pa = need("pyarrow", "parquet")
        return self.make(pa.repeat(pa.scalar(self.value, self.type), batch.num_rows))


def partition_values(path: str) -> dict[str, str]:
    """Return the columns that the names of a file's folders state.

    >>> partition_values("s3://bucket/year=2026/label=hot%20dog/a=1.parquet")
    {'year': '2026', 'label': 'hot dog'}
    """
    pairs = (name.partition("=") for name in path.split("/")[:-1])
    return {unquote(key): unquote(value) for key, equals, value in pairs if key and equals}


def partition_leaves(paths: Sequence[str], names: Iterable[str]) -> list[dict[str, PartitionLeaf]]:
    """Return the fields of each file that are the partitions `names`.

    Raises:
        SourceError: a file is in no folder that states one.
    """
    values = [partition_values(path) for path in paths]
    found: list[dict[str, PartitionLeaf]] = [{} for _ in paths]
    for name in names:
        for path, stated in zip(paths, values, strict=True):
            if name not in stated:
                known = ", ".join(map(repr, stated)) or "none"
                raise SourceError(f"{path}: partitions= names {name!r}, and its folders state {known}")
        texts = [stated[name] for stated in values]
        is_number = all(_INTEGER.fullmatch(text) for text in texts if text != _NULL)
        leaf = _leaf(name, "int64" if is_number and {*texts} != {_NULL} else "string")
        for number, text in enumerate(texts):
            value = None if text == _NULL else int(text) if leaf.field.kind == "number" else text
            found[number][name] = PartitionLeaf(leaf.field, leaf.path, leaf.make, leaf.type, value)
    return found


def _leaf(name: str, type: str) -> Leaf:
    pa = need("pyarrow", "parquet")
    leaf = leaves(pa.schema([(name, pa.type_for_alias(type))]))[name]
    assert isinstance(leaf, Leaf)
    return leaf


def check_left_out(paths: Sequence[str], columns: Iterable[str], fields: Selection) -> None:
    """Warn of partitions that tell files apart and are no field; `columns` are those of the files, and those asked for.

    Raises:
        SourceError: such a partition is among the fields that are asked for.
    """
    stated = [partition_values(path) for path in dict.fromkeys(path.rpartition("/")[0] + "/" for path in paths)]
    names = dict.fromkeys(name for one in stated for name in one)
    left_out = [name for name in names if name not in columns and len({one.get(name) for one in stated}) > 1]
    if not left_out:
        return
    what = f"the folders of {paths[0]} and others state {', '.join(map(repr, left_out))}, which the files do not hold"
    if fields.chosen is None:
        warnings.warn(
            f"left out: {what}; pass partitions={left_out!r} to read it, or fields= to do without it", stacklevel=2
        )
    elif wanted := [name for _, name in fields.chosen if name in left_out]:
        raise SourceError(f"there is no field {wanted[0]!r}: {what}; pass partitions={wanted!r} to read it")
