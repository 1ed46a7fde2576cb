"""Going on with an optimizer's step that failed in its middle, from where it failed.

A step is a fixed sequence of operations. Those that change parameters and moments in place have been counted by the
tensors' version counters, for nothing: so many of each tensor's changes are done. The step is run again, and these are
left out. All other operations are done again. They may read tensors that are further on than they were the first time;
then their results are suspect. A suspect result may flow into a change that is left out, as it mostly does. If it were
to flow into one that is not, into a number, or into the optimizer's state, weights would be wrong: `TornStepError`. So
it is, too, when the changes do not add up to those of a whole step, which was counted before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from penstock.memory.failure import FailureLog
from penstock.memory.holdings import storage_key
from penstock.memory.insist import Insisting, written


class TornStepError(Exception):
    """The optimizer's step has failed in its middle, and nothing can say which weights are right."""


class Resuming(Insisting):
    """While it is on, the changes that were made already are left out.

    Args:
        done: how many changes of each storage (by its `_cdata`) have been made.
        expected: how many a whole step makes.
        log: takes note of further failures.
    """

    def __init__(self, done: Mapping[int, int], expected: Mapping[int, int], log: FailureLog) -> None:
        super().__init__((), log)
        self._left = dict(done)
        self._to_do = {key: count - done[key] for key, count in expected.items()}
        self._suspect: dict[int, Any] = {}
        """Storages that hold something else than the first time; kept alive, so that none takes another's place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changed = list(written(func, args, kwargs or {}))
        to_leave_out = [self._left.get(storage_key(one), 0) > 0 for one in changed]
        if changed and all(to_leave_out):
            for one in changed:
                self._left[storage_key(one)] -= 1
            return args[0] if isinstance(args[0], Tensor) else None
        if any(to_leave_out):
            raise TornStepError(f"{func} had changed some of its tensors and not others")
        is_suspect = any(self._is_suspect(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        if is_suspect and (func is torch.ops.aten._local_scalar_dense.default or self._concerns(changed)):
            raise TornStepError(f"{func} would need what a tensor held before it was changed")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for one in changed:
            if storage_key(one) in self._to_do:
                self._to_do[storage_key(one)] -= 1
        if is_suspect:
            for one in (*changed, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))):
                if storage_key(one) not in self._left:
                    self._suspect[storage_key(one)] = one
        return result

    def check(self, state: Iterable[Tensor]) -> None:
        """Say that the step is over.

        Raises:
            TornStepError: it was another step than the first time, or a suspect result is in the optimizer's state.
        """
        if any(self._left.values()) or any(self._to_do.values()):
            raise TornStepError("the step, run again, was another one than before")
        if any(storage_key(tensor) in self._suspect for tensor in state):
            raise TornStepError("the optimizer's state would need what a tensor held before it was changed")

    def _is_suspect(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._suspect or self._left.get(key, 0) > 0

    def _concerns(self, changed: list[Tensor]) -> bool:
        """Return whether a parameter or a moment is among what an operation writes."""
        return any(storage_key(one) in self._left for one in changed)
