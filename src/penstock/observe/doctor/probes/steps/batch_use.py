"""Which tensors of its batch a step never touches: they were made, collated and sent for nothing.

What the program keeps for later, and steps that run compiled functions, of which nothing is seen, prove nothing.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from penstock.observe.doctor.step_results import UnusedField


@dataclass(slots=True)
class _Field:
    tensor: weakref.ref[torch.Tensor]
    nbytes: int
    what: str
    is_used: bool = False


@dataclass(slots=True)
class _Step:
    fields: dict[str, _Field] = field(default_factory=dict)
    storages: dict[int, _Field] = field(default_factory=dict)


class BatchUse:
    """Follows what observed steps do with their batches."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._compiled = 0
        self._is_unknown = False

    def begin_step(self, batch: Any) -> None:
        """Note what a step gets."""
        step = _Step()
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                what = f"{keystr(path)} ({str(leaf.dtype).removeprefix('torch.')}, {tuple(leaf.shape)})"
                own = _Field(weakref.ref(leaf), leaf.nbytes, what)
                step.fields[keystr(path)] = own
                step.storages[leaf.untyped_storage()._cdata] = own
        self._steps.append(step)
        self._compiled = _compiled_frames()

    def note(self, operands: Any) -> None:
        """Note what an operation gets."""
        if self._steps and self._steps[-1].storages:
            storages = self._steps[-1].storages
            for one in tree_leaves(operands):
                if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                    own = storages.get(one.untyped_storage()._cdata)
                    if own is not None:
                        own.is_used = True

    def end_step(self) -> None:
        """Look no more until the next step."""
        self._is_unknown |= bool(self._compiled or _compiled_frames())

    def result(self) -> tuple[UnusedField, ...]:
        """Return what no observed step used, and no part of the program holds any more."""
        if self._is_unknown or len(self._steps) < 2:
            return ()
        names = set.intersection(*({*step.fields} for step in self._steps))
        seen = {name: [step.fields[name] for step in self._steps] for name in names}
        return tuple(
            UnusedField(what=fields[-1].what, nbytes=fields[-1].nbytes)
            for name, fields in sorted(seen.items())
            if not any(one.is_used or one.tensor() is not None for one in fields)
        )


def _compiled_frames() -> int:
    """Return how many functions torch.compile has seen."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return sum(dynamo.counters["frames"].values()) if dynamo is not None else 0
