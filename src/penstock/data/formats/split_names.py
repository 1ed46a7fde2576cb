"""Splits that the names of files and folders state, as train-00000-of-00008.parquet, val.bin and test/ do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

_SPLIT = re.compile(
    r"(?<![a-z])(?:(?P<train>train(?:ing)?)|(?P<validation>val(?:id(?:ation)?)?|dev)|(?P<test>test(?:ing)?|eval(?:uation)?))"
    r"(?![a-z])"
)


def splits_in(names: Iterable[str]) -> dict[str, str]:
    """Return the splits that some names state, each with the first such name; a path states its first one.

    >>> splits_in(["x-train.tfrecord-00000-of-00002", "train2017/test.jpg", "dev/a.wav", "latest.csv", "contest/7.csv"])
    {'train': 'x-train.tfrecord-00000-of-00002', 'validation': 'dev/a.wav'}
    """
    found: dict[str, str] = {}
    for name in names:
        if match := _SPLIT.search(name.lower()):
            found.setdefault(str(match.lastgroup), name)
    return found


def warn_of_splits(path: str, names: Iterable[str], consequence: str) -> None:
    """Warn if what lies in the folder `path`, with these names below it, is of several splits."""
    splits = splits_in(names)
    if len(splits) > 1:
        examples = ", ".join(f"{split} ({name})" for split, name in splits.items())
        warnings.warn(
            f"{path} holds several splits, {consequence}: {examples}; to read one of them, open its folder, or name "
            "its files (with wildcards)",
            stacklevel=2,
        )
