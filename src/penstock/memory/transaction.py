"""The optimizer's step as a transaction: it happens wholly or, for every parameter, not at all.

`optimizer.step()` is not atomic. After a failure in its middle some moments have been updated and some parameters have
not, and stepping again gives other weights. What to do depends on the optimizer:

- **Resume** (`resume.py`): the step is run as it is, and one that fails is gone on with. Costs nothing until it fails.
  For those of torch's optimizers of which tests show that it can be done from every point.
- **Insist** (`insist.py`): each operation that runs out of memory is done again by itself. Costs microseconds per
  operation. For torch's other optimizers, and for the first step, which makes the state.
- **Careful**, for optimizers that are not torch's, for sharded parameters (whose operations are hidden inside of
  others), and where memory stays short: parameters are stepped in chunks. What
  a chunk will change is copied to a scratch that all chunks share, and put back should the chunk fail. Chunks that are
  done stay done; `step` called again goes on with the others. Small chunks also keep the optimizer's temporaries small.

Optimizers of torch's treat each parameter by itself, so that a part of the parameters may be stepped at a time. Of
others that is not known: they are stepped in one chunk.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_map

from penstock.core.errors import OptionError
from penstock.device.oom import is_out_of_memory
from penstock.distributed.peers import local
from penstock.memory.failure import Failure, FailureLog, attempt, collect, let_go
from penstock.memory.holdings import state_tensors, storage_key
from penstock.memory.insist import Insisting
from penstock.memory.resume import Resuming, TornStepError

_TENSORWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip
_RESUMABLE = frozenset(
    {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad}
)
"""Tests fail them at every operation, with weight decay and without, one tensor at a time, `foreach` and `fused`."""

_CPU_CHUNK_NBYTES = 4 << 20
_DEVICE_CHUNK_NBYTES = 256 << 20
_ALIGNMENT = 64
_PUT_BACK_TRIES = 3


_Changed = tuple[Tensor, list[Tensor]]
"""A parameter, and all tensors that its step changes."""


@dataclass(slots=True)
class _Chunk:
    """Parameters that are stepped together, what their step will change, and room for a copy of that."""

    params: list[Tensor]
    tensors: list[Tensor]
    copies: list[Tensor]
    sparse: list[Tensor]
    """What has no room, for it may grow: it must not have changed when it is to be put back."""


@dataclass(frozen=True, slots=True)
class _BrokenOff:
    """Where a step was broken off: the versions of what it changes, and how many changes of each storage are done."""

    versions: list[int]
    done: dict[int, int]


@dataclass(slots=True)
class _Saved:
    """What is no tensor, as it was: each parameter's state (None: none yet), each group's options."""

    states: list[tuple[Tensor, dict[str, Any] | None]]
    options: list[tuple[dict[str, Any], dict[str, Any]]]


def refuse_closure(optimizer: Optimizer | None) -> None:
    """Raise OptionError for an optimizer that evaluates the loss by itself."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("LBFGS evaluates the loss by itself, several times per step; use an optimizer that does not")


class StepTransaction:
    """Steps `optimizer` so that a failure can be followed by another try.

    It looks enough like an optimizer (`param_groups`, `step`) to be given to `GradScaler.unscale_` and `.step`.

    Args:
        optimizer: not one that needs a closure.
        log: takes note of every failure that a single operation survived.
        chunk_nbytes: about how many bytes of parameters and state to step at a time, when stepping carefully.
    """

    def __init__(self, optimizer: Optimizer, *, log: FailureLog, chunk_nbytes: int | None = None) -> None:
        self.optimizer = optimizer
        self._log = log
        is_sharded = any(local(p) is not p for group in optimizer.param_groups for p in group["params"])
        self.is_careful = is_sharded or type(optimizer) not in _TENSORWISE
        self._chunk_nbytes = chunk_nbytes
        self._is_torn = False
        """Whether a step was begun that has neither ended nor been undone."""
        self._counted: list[Tensor] = []
        self._whole_step: list[int] = []
        """How often a step changes each of those."""
        self._broken_off: _BrokenOff | None = None
        self._scratch: dict[torch.device, Tensor] = {}
        self._queue: deque[_Chunk] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    @property
    def is_underway(self) -> bool:
        """Whether a step has begun and is not over."""
        return self._queue is not None

    def step(self) -> None:
        """Do what is left of the step. After an out-of-memory, what was done is consistent; call again to go on.

        Raises:
            torch.OutOfMemoryError: memory ran out; nothing is spoiled.
            TornStepError: the step failed in its middle, in a way that could not be undone.
        """
        if self._is_torn:
            self._finish()
            return
        if not self.is_careful:
            self._step_swiftly()
            return
        if self._queue is None:
            self._queue = deque(self._chunks())
        while self._queue:
            self._step_chunk(self._queue[0])
            self._queue.popleft()
        self._queue = None

    # ── swift ───────────────────────────────────────────────────────────────────────────────────────────────

    def _step_swiftly(self) -> None:
        params = self._stepped()
        if not has_room_for_temporaries(params):
            self.is_careful = True
            self.step()
            return
        tensors = self._changed(params)
        if not self._can_resume(tensors):
            self._step_insisting(params, tensors)
            return
        versions = [tensor._version for tensor in tensors]
        self._is_torn = True
        try:
            self.optimizer.step()
            self._is_torn = False
            return
        except BaseException as error:
            now = [tensor._version for tensor in tensors]
            if now == versions:
                self._is_torn = False
                raise
            done = dict(zip(map(storage_key, tensors), map(operator.sub, now, versions), strict=True))
            if not is_out_of_memory(error):
                self._broken_off = _BrokenOff(now, done)
                raise
            self._log.note(Failure.of(error))
            caught = error
        let_go(caught)
        del caught
        collect()
        self._resume(done)
        self._is_torn = False

    def _finish(self) -> None:
        """Go on with a step that something else than memory has broken off (Ctrl-C, say), if nothing changed since."""
        broken_off, self._broken_off = self._broken_off, None
        tensors = self._changed(self._stepped())
        if (
            broken_off is None
            or not self._can_resume(tensors)
            or broken_off.versions != [tensor._version for tensor in tensors]
        ):
            raise TornStepError("it was broken off before")
        self._resume(broken_off.done)
        self._is_torn = False

    def _step_insisting(self, params: list[Tensor], tensors: list[Tensor]) -> None:
        saved = self._save_states(params)
        self._is_torn = True
        insisting = Insisting(set(map(storage_key, tensors)), self._log)
        try:
            with insisting:
                self.optimizer.step()
        except Exception as error:
            if insisting.changes:
                raise TornStepError(str(error)) from error
            self._restore_states(saved)
            self._is_torn = False
            self.is_careful = is_out_of_memory(error)
            raise
        self._is_torn = False
        if len(set(map(storage_key, tensors))) == len(tensors):  # else nothing could tell whose changes are done
            self._counted, self._whole_step = tensors, [insisting.changes[storage_key(one)] for one in tensors]

    def _resume(self, done: dict[int, int]) -> None:
        if len(done) < len(self._counted):
            raise TornStepError("parameters came to share their memory")
        expected = dict(zip(map(storage_key, self._counted), self._whole_step, strict=True))
        resuming = Resuming(done, expected, self._log)
        try:
            with resuming:
                self.optimizer.step()
        except torch.OutOfMemoryError as error:
            raise TornStepError(str(error)) from error
        resuming.check(state_tensors(self.optimizer, self._stepped()))

    def _can_resume(self, tensors: list[Tensor]) -> bool:
        """Return whether a failure could be gone on from: whether the changes of a whole step have been counted.

        While a mode is on (a test's, say), version counters do not tell of operations on lists of tensors.
        """
        if type(self.optimizer) not in _RESUMABLE or self._has_hooks() or torch._C._len_torch_dispatch_stack():
            return False
        return len(tensors) == len(self._counted) and all(map(operator.is_, tensors, self._counted))

    # ── careful ─────────────────────────────────────────────────────────────────────────────────────────────

    def _chunks(self) -> list[_Chunk]:
        parts = self._parts([(p, self._changed([p])) for p in self._stepped()])
        changed = [[tensor for _, tensors in part for tensor in tensors] for part in parts]
        dense = [[tensor for tensor in tensors if tensor.layout is torch.strided] for tensors in changed]
        sparse = [[tensor for tensor in tensors if tensor.layout is not torch.strided] for tensors in changed]
        self._make_scratch(dense)
        return [
            _Chunk([param for param, _ in part], tensors, self._rooms(tensors), others)
            for part, tensors, others in zip(parts, dense, sparse, strict=True)
        ]

    def _parts(self, every: list[_Changed]) -> list[list[_Changed]]:
        """Cut the list of parameters, each with what its step changes, into chunks."""
        if not self._is_divisible():
            return [every]
        parts: list[list[_Changed]] = []
        nbytes = 0
        for param, tensors in every:
            on_host = param.device.type == "cpu"
            limit = self._chunk_nbytes or (_CPU_CHUNK_NBYTES if on_host else _DEVICE_CHUNK_NBYTES)
            own = sum(tensor.nbytes for tensor in tensors)
            if not parts or nbytes + own > limit:
                parts.append([])
                nbytes = 0
            parts[-1].append((param, tensors))
            nbytes += own
        return parts

    def _is_divisible(self) -> bool:
        return type(self.optimizer) in _TENSORWISE and not self._has_hooks()

    def _has_hooks(self) -> bool:
        """Return whether there are hooks, which are to run once for a step."""
        optimizer = self.optimizer
        own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _step_chunk(self, chunk: _Chunk) -> None:
        if chunk.tensors:
            with torch.no_grad():
                torch._foreach_copy_(chunk.copies, chunk.tensors)
        saved = self._save_states(chunk.params)
        versions = [tensor._version for tensor in chunk.sparse]
        try:
            self._step_only(chunk)
        except BaseException as error:
            if versions != [tensor._version for tensor in chunk.sparse]:
                self._is_torn = True
                raise TornStepError(str(error)) from error
            self._put_back(chunk, saved)
            raise

    def _step_only(self, chunk: _Chunk) -> None:
        """Let the optimizer see the chunk's parameters, and no others."""
        every = self.optimizer.param_groups
        whole = [group["params"] for group in every]
        mine = set(map(id, chunk.params))
        try:
            for group in every:
                group["params"] = [p for p in group["params"] if id(p) in mine]
            self.optimizer.param_groups = [group for group in every if group["params"]]
            self.optimizer.step()
        finally:
            for group, params in zip(every, whole, strict=True):
                group["params"] = params
            self.optimizer.param_groups = every

    @torch.no_grad()
    def _put_back(self, chunk: _Chunk, saved: _Saved) -> None:
        self._restore_states(saved)
        for _ in range(_PUT_BACK_TRIES):
            try:
                torch._foreach_copy_(chunk.tensors, chunk.copies)
                return
            except torch.OutOfMemoryError:
                continue  # it takes no memory: whatever said so, it can be done again

    def _make_scratch(self, changed: list[list[Tensor]]) -> None:
        """See to one piece of memory per device in which the copies of any one chunk have room."""
        needed: dict[torch.device, int] = {}
        for tensors in changed:
            own: dict[torch.device, int] = {}
            for tensor in tensors:
                own[tensor.device] = own.get(tensor.device, 0) + _room_nbytes(tensor)
            for device, nbytes in own.items():
                needed[device] = max(needed.get(device, 0), nbytes)
        for device, nbytes in needed.items():
            if device not in self._scratch or self._scratch[device].numel() < nbytes:
                self._scratch.pop(device, None)
                self._scratch[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _rooms(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return room for a copy of each, one behind the other."""
        rooms, offsets = [], dict.fromkeys(self._scratch, 0)
        for tensor in tensors:
            start = offsets[tensor.device]
            flat = self._scratch[tensor.device][start : start + tensor.nbytes].view(tensor.dtype)
            rooms.append(flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride()))
            offsets[tensor.device] = start + _room_nbytes(tensor)
        return rooms

    # ── both ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stepped(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _changed(self, params: list[Tensor]) -> list[Tensor]:
        """Return what a step of `params` changes: themselves and their state; of sharded ones, this rank's part.

        An optimizer that is not torch's may change the gradients too (centralize them, say).
        """
        changed = [*map(local, params), *state_tensors(self.optimizer, params)]
        if type(self.optimizer) not in _TENSORWISE:
            changed += [local(param.grad) for param in params if param.grad is not None]
        return changed

    def _save_states(self, params: list[Tensor]) -> _Saved:
        state = self.optimizer.state
        return _Saved(
            [(p, _copied(state[p]) if p in state else None) for p in params],
            [(group, {**group, "params": None}) for group in self.param_groups],
        )

    def _restore_states(self, saved: _Saved) -> None:
        for param, state in saved.states:
            if state is None:
                self.optimizer.state.pop(param, None)
            else:
                self.optimizer.state[param].clear()
                self.optimizer.state[param].update(state)
        for group, options in saved.options:
            params = group["params"]
            group.clear()
            group.update(options, params=params)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's state, down to lists and dicts inside of it; tensors are the same."""
    copied: dict[str, Any] = tree_map(lambda leaf: leaf, dict(state))
    return copied


def has_room_for_temporaries(params: list[Tensor]) -> bool:
    """Return whether an accelerator has memory for as much again as its parameters, for the whole step at once."""
    needed: dict[torch.device, int] = {}
    for param in params:
        if param.device.type != "cpu":
            needed[param.device] = needed.get(param.device, 0) + param.nbytes
    for device, nbytes in needed.items():
        if attempt(functools.partial(torch.empty, nbytes, dtype=torch.uint8, device=device)).failure is not None:
            return False
    return True


def _room_nbytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
