"""Hive partitions: columns that are in the names of folders, as in year=2026/label=cat/a.parquet, and not in the files.

Spark, pandas (partition_cols=) and polars write them. They are read where they are asked for, as int64 if all values of
a column are integers, else as text; `__HIVE_DEFAULT_PARTITION__` is null.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.formats.arrow.columns import Column
from penstock.data.formats.arrow.types import Leaf, leaves
from penstock.data.formats.partition_names import partition_values
from penstock.data.optional import need

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
