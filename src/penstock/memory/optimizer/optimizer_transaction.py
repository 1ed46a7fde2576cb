"""StepTransaction: an optimizer's step that happens wholly or, for every parameter, not at all.

`optimizer.step()` is not atomic. After a failure in its middle some moments have been updated and some parameters have
not, and stepping again gives other weights. There are two ways to step:

- **Undoably**: torch's optimizers, which treat each parameter by itself, in chunks of parameters (`chunked_step.py`);
  others from a copy of all that they refer to (`copied_step.py`). The first step, which allocates the state, is of that
  kind, and those for whose temporaries an accelerator has no room.
- **As it is**, which costs nothing until it fails. For some of torch's optimizers tests show that a step can be resumed
  from every point of failure (`resume_optimizer.py`). All others step as they are only until memory has run out for the
  first time, anywhere in the training step, and if that is in the middle of such a step, it is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.device.oom import is_out_of_memory
from penstock.distributed.rank_group import local_tensor
from penstock.memory.model_tensors import state_tensors, storage_key
from penstock.memory.optimizer.chunked_step import ChunkedStep
from penstock.memory.optimizer.copied_step import CopiedStep
from penstock.memory.optimizer.joined_optimizers import JoinedOptimizers
from penstock.memory.optimizer.optimizer_state import (
    has_room,
    has_step_hooks,
    is_tensorwise,
    nbytes_by_accelerator,
    step_without_hooks,
)
from penstock.memory.optimizer.resume_optimizer import PartialStepError, StepResumption
from penstock.memory.recovery.out_of_memory import Failure, FailureLog, clear_frames, free_memory

_RESUMABLE = frozenset(
    {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad}
)
"""Tests fail them at every operation, with weight decay and without, one tensor at a time, `foreach` and `fused`."""

_MOST_KINDS = 64
"""Kinds of steps (which parameters have gradients) that are remembered, as of a model with experts."""
_class: Any = Tensor
_params_of = operator.itemgetter("params")
_grad_of, _version = _class.grad.__get__, _class._version.__get__
"""As `map(attrgetter(...), tensors)`, in half of its time."""


class _BegunStep(NamedTuple):
    """A step that has ended in an error: what it changes, and how often that had been changed before and was then."""

    tensors: list[Tensor]
    before: list[int]
    now: list[int]


class StepTransaction:
    """Steps `optimizer` so that a failure can be followed by another call.

    It looks enough like an optimizer (`param_groups`, `step`) to be given to `GradScaler.unscale_` and `.step`.

    Args:
        optimizer: not one that needs a closure.
        log: of the failures of the whole training step.
    """

    def __init__(self, optimizer: Optimizer, *, log: FailureLog) -> None:
        self.optimizer = optimizer
        self._log = log
        is_whole = all(local_tensor(p) is p for group in optimizer.param_groups for p in group["params"])
        self._undoable = ChunkedStep(optimizer) if is_tensorwise(optimizer) else CopiedStep(optimizer)
        self.is_careful = is_tensorwise(optimizer) and not is_whole
        """Whether each step is undoable: of sharded parameters (whose operations are hidden inside others), and from
        the first one on that has failed."""
        self._is_lost = False
        """Whether a step was begun that has neither ended nor been undone."""
        self._begun: _BegunStep | None = None
        """That step, where it can be resumed."""
        self._has_stepped = False
        self._needed: dict[torch.device, int] = {}
        """Bytes of the parameters, on each accelerator: as much may a whole step need for temporaries."""
        self._held: list[Any] = []
        """All parameters and what their states hold."""
        self._tensors: list[Tensor] = []
        """What steps change of that, where they can be resumed."""
        self._kinds: set[bytes] = set()
        """Which of the parameters had gradients in steps that were taken, so that all their states are there."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Do what is left of the step. After an out-of-memory, what was done is consistent; call it again to resume.

        Raises:
            torch.OutOfMemoryError: memory ran out; nothing is spoiled.
            PartialStepError: the step failed in its middle, in a way that could not be undone.
        """
        if self._is_lost:
            self._resume()
            return
        # While a dispatch mode is on (a test's, say), version counters miss operations on lists of tensors.
        if self._has_stepped and not self.is_careful and not torch._C._len_torch_dispatch_stack():
            is_resumable = type(self.optimizer) in _RESUMABLE and not has_step_hooks(self.optimizer)
            if is_resumable and self._is_known():
                if has_room(self._needed):
                    self._step_resumably()
                    return
                self.is_careful = True
            elif not is_resumable and not self._log.count and has_room(self._needed):
                self._step_as_it_is()
                return
        self._step_undoably()

    def _step_undoably(self) -> None:
        try:
            self._undoable.run()
        except BaseException as error:
            self.is_careful = True
            self._is_lost = isinstance(error, PartialStepError)
            raise
        if self._has_stepped and type(self.optimizer) not in _RESUMABLE:
            return
        self._has_stepped = True
        self._needed = nbytes_by_accelerator(self._params())
        if type(self.optimizer) in _RESUMABLE:
            held, kind = self._held_now()
            if not self._holds(held):
                self._held, self._tensors = held, [*map(local_tensor, self._params()), *state_tensors(self.optimizer)]
                self._kinds.clear()
            if len(self._kinds) < _MOST_KINDS:
                self._kinds.add(kind)

    def _params(self) -> list[Tensor]:
        return [*chain.from_iterable(map(_params_of, self.optimizer.param_groups))]

    # ── as it is ────────────────────────────────────────────────────────────────────────────────────────────

    def _step_as_it_is(self) -> None:
        self._undoable.free()
        self._is_lost = True
        try:
            self.optimizer.step()
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            raise PartialStepError(
                f"{error}; what a step of {type(self.optimizer).__name__} changes is copied only from the first time "
                "on that memory runs out"
            ) from error
        self._is_lost = False

    def _is_known(self) -> bool:
        """Return whether steps of the same parameters and states were taken before, so that this one can be resumed.

        Nothing here is called per parameter, but functions that are C.
        """
        held, kind = self._held_now()
        if not self._holds(held):
            self._kinds.clear()
        return kind in self._kinds

    def _held_now(self) -> tuple[list[Any], bytes]:
        """Return all parameters, with what their states hold, and which of the parameters have gradients."""
        params = self._params()
        kind = bytes(map(operator.is_, map(_grad_of, params), repeat(None)))
        return [*params, *chain.from_iterable(map(dict.values, self.optimizer.state.values()))], kind

    def _holds(self, held: list[Any]) -> bool:
        return len(held) == len(self._held) and all(map(operator.is_, held, self._held))

    def _step_resumably(self) -> None:
        tensors = self._tensors
        before = [*map(_version, tensors)]
        self._is_lost = True
        try:
            step_without_hooks(self.optimizer)()
            self._is_lost = False
            return
        except BaseException as error:
            begun = _BegunStep(tensors, before, [*map(_version, tensors)])
            if begun.now == before:
                self._is_lost = False
                raise
            self._begun = begun
            if not is_out_of_memory(error):
                raise
            self._log.record(Failure.of(error))
            caught = error
        clear_frames(caught)
        del caught
        free_memory()
        self._resume()

    def _resume(self) -> None:
        """Resume a step that memory, or something else (Ctrl-C, say), has interrupted, if nothing changed since."""
        begun, self._begun = self._begun, None
        if begun is None or not self._is_known() or begun.now != [*map(_version, begun.tensors)]:
            raise PartialStepError("it was interrupted before")
        done = dict(zip(map(storage_key, begun.tensors), map(operator.sub, begun.now, begun.before), strict=True))
        if len(done) < len(begun.tensors):
            raise PartialStepError("parameters have come to share their memory")
        resumption = StepResumption(done, self._log)
        try:
            with resumption:
                self.optimizer.step()
        except torch.OutOfMemoryError as error:
            raise PartialStepError(str(error)) from error
        resumption.check(state_tensors(self.optimizer))
        self._is_lost = False


class StepTransactions:
    """Steps several optimizers, one after the other; each once, however often memory runs out.

    Args:
        optimizers: of one model.
        log: records every failure that a single operation survived.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, log: FailureLog) -> None:
        self._transactions = [StepTransaction(one, log=log) for one in optimizers]
        self._left = list(self._transactions)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [group for one in self._transactions for group in one.param_groups]

    def step(self) -> None:
        """Do what is left of the step, as `StepTransaction.step` does."""
        while self._left:
            self._left[0].step()
            self._left.pop(0)
        self._left = list(self._transactions)


def transaction_of(optimizer: Optimizer, *, log: FailureLog) -> StepTransaction | StepTransactions:
    """Return what steps an optimizer, or each of several that were joined."""
    if isinstance(optimizer, JoinedOptimizers):
        return StepTransactions(optimizer.optimizers, log=log)
    return StepTransaction(optimizer, log=log)
