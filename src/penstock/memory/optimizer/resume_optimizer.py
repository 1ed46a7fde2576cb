"""Resuming an optimizer's step that failed in its middle, from where it failed.

A step is a fixed sequence of operations. The tensors' version counters have counted, at no cost, how many in-place
changes of each parameter and moment are done. The step runs again, and these changes are skipped. All other operations
run again. They may read tensors that have changed since the first time; then their results are suspect. Mostly a
suspect result flows into a change that is skipped. If it would flow into one that is not, into a number, or into the
optimizer's state, weights would be wrong: `PartialStepError`. The same is raised if not all changes come once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from penstock.memory.model_tensors import storage_key
from penstock.memory.recovery.out_of_memory import FailureLog, RetryOps, written_tensors

_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""What makes a number of a tensor."""

_VISIBLE = ("aten", "prims", "profiler")


class PartialStepError(Exception):
    """The optimizer's step failed in its middle, and nobody can know which weights are right."""


class StepResumption(RetryOps):
    """While it is on, changes that were made before the failure are skipped.

    Args:
        done: how many changes of each storage (by its `_cdata`) have been made.
        log: records further failures.
    """

    def __init__(self, done: Mapping[int, int], log: FailureLog) -> None:
        super().__init__((), log)
        self._to_skip = dict(done)
        self._suspect: dict[int, Any] = {}
        """Storages whose content differs from the first time; kept alive, so that no other gets their key."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _VISIBLE:
            raise PartialStepError(f"{func} is not an operation of torch's own, which say what they change")
        changed = list(written_tensors(func, args, kwargs or {}))
        is_done = [self._to_skip.get(storage_key(one), 0) > 0 for one in changed]
        if changed and all(is_done):
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise PartialStepError(f"{func} had drawn random numbers")
            for one in changed:
                self._to_skip[storage_key(one)] -= 1
            return args[0] if isinstance(args[0], Tensor) else None
        if any(is_done):
            raise PartialStepError(f"{func} had changed some of its tensors and not others")
        is_suspect = any(self._is_suspect(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        if is_suspect and (func in _NUMBERS or self._changes_watched(changed)):
            raise PartialStepError(f"{func} would need what a tensor held before it was changed")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_suspect:
            for one in (*changed, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))):
                if storage_key(one) not in self._to_skip:
                    self._suspect[storage_key(one)] = one
        return result

    def check(self, state: Iterable[Tensor]) -> None:
        """Check, after the step, that it is complete and that its results can be trusted.

        Raises:
            PartialStepError: it was another step than the first time, or a suspect result is in the optimizer's state.
        """
        if any(self._to_skip.values()):
            raise PartialStepError("the step, run again, was another one than before")
        if any(storage_key(tensor) in self._suspect for tensor in state):
            raise PartialStepError("the optimizer's state would need what a tensor held before it was changed")

    def _is_suspect(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._suspect or self._to_skip.get(key, 0) > 0

    def _changes_watched(self, changed: list[Tensor]) -> bool:
        """Return whether an operation writes to a parameter or a moment."""
        return any(storage_key(one) in self._to_skip for one in changed)
