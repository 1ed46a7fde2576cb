"""The types of the fields of samples: a batch has the type of whatever samples it happens to hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.observe.doctor.content_results import FieldType, TypeChange

_SAME = {"int": "int64", "float": "float64"}


class FieldTypes:
    """Notes the type of each number, tensor and array of samples, by its place in the sample."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, object]] = {}

    def add(self, index: object, sample: Any) -> None:
        """Take a sample into account."""
        for path, leaf in torch.utils._pytree.tree_flatten_with_path(sample)[0]:
            name = _type_of(leaf)
            if name:
                self._seen.setdefault(torch.utils._pytree.keystr(path), {}).setdefault(name, index)

    def changes(self) -> tuple[TypeChange, ...]:
        """Return the fields that were a whole number in one sample and a fraction in another, or of two precisions.

        >>> types = FieldTypes()
        >>> types.add(0, {"x": torch.ones(2), "score": 1})
        >>> types.add(1, {"x": torch.ones(3), "score": 0.5})
        >>> [(one.field, [kind.name for kind in one.types]) for one in types.changes()]
        [("['score']", ['int', 'float'])]
        """
        return tuple(
            TypeChange(
                field=field, types=tuple(FieldType(name=name, index=index) for name, index in first_with.items())
            )
            for field, first_with in self._seen.items()
            if len({_kind(name) for name in first_with}) > 1
        )


def _type_of(leaf: Any) -> str:
    """Return the name of a numeric type; empty for everything else, and for what has no values."""
    if isinstance(leaf, torch.Tensor):
        return str(leaf.dtype).removeprefix("torch.") if leaf.numel() else ""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.name if leaf.size and leaf.dtype.kind in "biufc" else ""
    return type(leaf).__name__ if type(leaf) in (bool, int, float) else ""


def _kind(name: str) -> str:
    """Return what has to be the same in all samples: for integers only that they are integers."""
    name = _SAME.get(name, name)
    return "integer" if name.startswith(("int", "uint")) else name
