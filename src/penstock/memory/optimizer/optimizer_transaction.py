"""StepTransaction: an optimizer's step that happens wholly or, for every parameter, not at all.

`optimizer.step()` is not atomic. After a failure in its middle some moments have been updated and some parameters have
not, and stepping again gives other weights. There are four ways to step, and the optimizer decides which:

- **Fast**: the step runs as it is, and one that fails is resumed from where it failed (`resume_optimizer.py`). Costs
  nothing until it fails. For those of torch's optimizers that tests show to be resumable from every point.
- **Retried**: each operation that runs out of memory is retried by itself (`retry_ops.py`). Costs microseconds per
  operation. For torch's other optimizers, and for the first step, which allocates the state.
- **Chunked** (`chunked_step.py`): parameters are stepped in chunks that are undone if they fail. For sharded parameters
  (whose operations are hidden inside others), and where memory stays short.
- **Foreign** (`foreign_step.py`): the step runs from a copy of all that the optimizer refers to, until it is known what
  it changes. For optimizers that are not torch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.device.oom import is_out_of_memory
from penstock.distributed.rank_group import local_tensor
from penstock.memory.model_tensors import state_tensors, storage_key
from penstock.memory.optimizer.chunked_step import ChunkedStep
from penstock.memory.optimizer.foreign_step import ForeignStep
from penstock.memory.optimizer.joined_optimizers import JoinedOptimizers
from penstock.memory.optimizer.optimizer_state import (
    SavedOptimizerState,
    has_room,
    has_step_hooks,
    is_tensorwise,
    nbytes_by_accelerator,
    step_without_hooks,
    stepped_params,
)
from penstock.memory.optimizer.resume_optimizer import PartialStepError, StepResumption
from penstock.memory.recovery.out_of_memory import Failure, FailureLog, RetryOps, clear_frames, free_memory

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


@dataclass(frozen=True, slots=True)
class _CountedStep:
    """What a step changes of these tensors, counted once; as long as they are the same, it changes as much again."""

    tensors: list[Tensor]
    """All parameters, and their states."""
    changes: list[int]
    """How often a step changes each of those."""
    needed: dict[torch.device, int]
    """Bytes of parameters that are stepped, on each accelerator."""


@dataclass(frozen=True, slots=True)
class _Interrupted:
    """Where a step was interrupted: the versions of what it changes, and the changes done to each storage."""

    counted: _CountedStep
    versions: list[int]
    done: dict[int, int]


class StepTransaction:
    """Steps `optimizer` so that a failure can be followed by another call.

    It looks enough like an optimizer (`param_groups`, `step`) to be given to `GradScaler.unscale_` and `.step`.

    Args:
        optimizer: not one that needs a closure.
        log: records every failure that a single operation survived.
        chunk_nbytes: about how many bytes of parameters and state to step at a time, when chunked.
    """

    def __init__(self, optimizer: Optimizer, *, log: FailureLog, chunk_nbytes: int | None = None) -> None:
        self.optimizer = optimizer
        self._log = log
        is_sharded = any(local_tensor(p) is not p for group in optimizer.param_groups for p in group["params"])
        self._foreign = None if is_tensorwise(optimizer) else ForeignStep(optimizer, log)
        self.is_chunked = is_sharded and self._foreign is None
        self.chunked = ChunkedStep(optimizer, chunk_nbytes)
        self._is_partial = False
        """Whether a step was begun that has neither ended nor been undone."""
        self._held: list[Any] = []
        """All parameters and what their states hold, when steps were counted."""
        self._counted: dict[bytes, _CountedStep] = {}
        """By which parameters have gradients."""
        self._interrupted: _Interrupted | None = None

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
        if self._is_partial:
            self._resume_interrupted()
        elif self._foreign is not None:
            self._step_undoably(self._foreign.run)
        elif self.is_chunked:
            self._step_undoably(self.chunked.run)
        elif (counted := self._find_counted()) is not None and (not counted.needed or has_room(counted.needed)):
            self._step_fast(counted)
        else:
            self._step_slowly(counted)

    def _step_undoably(self, run: Callable[[], None]) -> None:
        try:
            run()
        except PartialStepError:
            self._is_partial = True
            raise

    def _step_slowly(self, counted: _CountedStep | None) -> None:
        params = stepped_params(self.optimizer)
        if counted is None and has_room(nbytes_by_accelerator(params)):
            self._step_with_retries(params)
        else:
            self.is_chunked = True
            self._step_undoably(self.chunked.run)

    # ── fast: resumed if it fails ───────────────────────────────────────────────────────────────────────────

    def _find_counted(self) -> _CountedStep | None:
        """Return a step of the same parameters and states whose changes have been counted, so that it can be resumed.

        Nothing here is called per parameter, but functions that are C. None while a dispatch mode is on (a test's,
        say): version counters then miss operations on lists of tensors.
        """
        if not self._counted or torch._C._len_torch_dispatch_stack() or has_step_hooks(self.optimizer):
            return None
        held, kind = self._held_now()
        if len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return self._counted.get(kind)
        self._counted.clear()
        return None

    def _held_now(self) -> tuple[list[Any], bytes]:
        """Return all parameters, with what their states hold, and which of the parameters have gradients."""
        optimizer = self.optimizer
        params = [*chain.from_iterable(map(_params_of, optimizer.param_groups))]
        kind = bytes(map(operator.is_, map(_grad_of, params), repeat(None)))
        return [*params, *chain.from_iterable(map(dict.values, optimizer.state.values()))], kind

    def _step_fast(self, counted: _CountedStep) -> None:
        tensors = counted.tensors
        versions = [*map(_version, tensors)]
        self._is_partial = True
        try:
            step_without_hooks(self.optimizer)()
            self._is_partial = False
            return
        except BaseException as error:
            now = [*map(_version, tensors)]
            if now == versions:
                self._is_partial = False
                raise
            done = dict(zip(map(storage_key, tensors), map(operator.sub, now, versions), strict=True))
            if not is_out_of_memory(error):
                self._interrupted = _Interrupted(counted, now, done)
                raise
            self._log.record(Failure.of(error))
            caught = error
        clear_frames(caught)
        del caught
        free_memory()
        self._resume(counted, done)
        self._is_partial = False

    def _resume_interrupted(self) -> None:
        """Resume a step that something else than memory has interrupted (Ctrl-C, say), if nothing changed since."""
        interrupted, self._interrupted = self._interrupted, None
        counted = self._find_counted()
        if (
            interrupted is None
            or counted is not interrupted.counted
            or interrupted.versions != [*map(_version, counted.tensors)]
        ):
            raise PartialStepError("it was interrupted before")
        self._resume(counted, interrupted.done)
        self._is_partial = False

    def _resume(self, counted: _CountedStep, done: dict[int, int]) -> None:
        if len(done) < len(counted.tensors):
            raise PartialStepError("parameters have come to share their memory")
        expected = dict(zip(map(storage_key, counted.tensors), counted.changes, strict=True))
        resumption = StepResumption(done, expected, self._log)
        try:
            with resumption:
                self.optimizer.step()
        except torch.OutOfMemoryError as error:
            raise PartialStepError(str(error)) from error
        resumption.check(state_tensors(self.optimizer))

    # ── retried, operation by operation ─────────────────────────────────────────────────────────────────────

    def _step_with_retries(self, params: list[Tensor]) -> None:
        saved = SavedOptimizerState.of(self.optimizer, params)
        tensors = self._all_tensors()
        self._is_partial = True
        retrying = RetryOps(set(map(storage_key, tensors)), self._log)
        try:
            with retrying:
                self.optimizer.step()
        except Exception as error:
            if retrying.changes:
                raise PartialStepError(str(error)) from error
            saved.restore(self.optimizer)
            self._is_partial = False
            self.is_chunked = is_out_of_memory(error)
            raise
        self._is_partial = False
        if type(self.optimizer) in _RESUMABLE:
            self._count(params, tensors, retrying)

    def _all_tensors(self) -> list[Tensor]:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return [*map(local_tensor, params), *state_tensors(self.optimizer)]

    def _count(self, params: list[Tensor], tensors: list[Tensor], retrying: RetryOps) -> None:
        """Remember how often a step changes each tensor, for the next of its kind."""
        keys = [*map(storage_key, tensors)]
        now = self._all_tensors()
        if len(set(keys)) < len(keys) or [*map(id, now)] != [*map(id, tensors)]:
            return  # changes could not be attributed to tensors; or some are new
        held, kind = self._held_now()
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            self._counted.clear()
        if len(self._counted) < _MOST_KINDS:
            self._held = held
            changes = [retrying.changes[key] for key in keys]
            self._counted[kind] = _CountedStep(tensors, changes, nbytes_by_accelerator(params))


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
