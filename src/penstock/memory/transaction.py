"""The optimizer's step as a transaction: it happens wholly or, for every parameter, not at all.

`optimizer.step()` is not atomic. After a failure in its middle some moments have been updated and some parameters have
not, and stepping again gives other weights. So parameters are stepped in chunks: what a chunk will change is copied to
a scratch that all chunks share, and put back should the chunk fail. Chunks that are done stay done; `step` called again
goes on with the others. Small chunks also keep the optimizer's temporaries small, and the copies in a cache.

Optimizers of torch's treat each parameter by itself, so that a part of the parameters may be stepped at a time. Of
others that is not known: they are stepped in one chunk.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_TENSORWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip
_CPU_CHUNK_NBYTES = 4 << 20
_DEVICE_CHUNK_NBYTES = 256 << 20
_ALIGNMENT = 64
_PUT_BACK_TRIES = 3


@dataclass(slots=True)
class _Chunk:
    """Parameters that are stepped together, what their step will change, and room for a copy of that."""

    params: list[Tensor]
    tensors: list[Tensor]
    copies: list[Tensor]


@dataclass(slots=True)
class _Saved:
    """What is no tensor, as it was: each parameter's state (None: none yet), each group's options."""

    states: list[tuple[Tensor, dict[str, Any] | None]]
    options: list[tuple[dict[str, Any], dict[str, Any]]]


class StepTransaction:
    """Steps `optimizer` so that a failure can be followed by another try.

    It looks enough like an optimizer (`param_groups`, `step`) to be given to `GradScaler.unscale_` and `.step`.

    Args:
        optimizer: not one that needs a closure.
        chunk_nbytes: about how many bytes of parameters and state to step at a time.
    """

    def __init__(self, optimizer: Optimizer, chunk_nbytes: int | None = None) -> None:
        self.optimizer = optimizer
        self._chunk_nbytes = chunk_nbytes
        self._scratch: dict[torch.device, Tensor] = {}
        self._plan: list[_Chunk] = []
        self._planned_for: list[Tensor] = []
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
        """Do what is left of the step. After an exception, what was done is consistent; call again to go on."""
        if self._queue is None:
            self._queue = deque(self._chunks())
        while self._queue:
            self._step_chunk(self._queue[0])
            self._queue.popleft()
        self._queue = None

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _chunks(self) -> list[_Chunk]:
        """Return the chunks; those of the last step where the same tensors are to be stepped."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        changed = [[p, *self._state_tensors(p)] for p in params]
        flat = [tensor for tensors in changed for tensor in tensors]
        if len(flat) != len(self._planned_for) or any(map(operator.is_not, flat, self._planned_for)):
            self._plan, self._planned_for = [], []
            parts = self._parts(changed)
            self._make_scratch(parts)
            self._plan = [
                _Chunk(
                    [tensors[0] for tensors in part], tensors := [t for one in part for t in one], self._rooms(tensors)
                )
                for part in parts
            ]
            self._planned_for = flat
        return self._plan

    def _parts(self, changed: list[list[Tensor]]) -> list[list[list[Tensor]]]:
        """Cut the list of (parameter and its state) into chunks."""
        if not self._is_divisible():
            return [changed]
        parts: list[list[list[Tensor]]] = []
        nbytes = 0
        for tensors in changed:
            on_host = tensors[0].device.type == "cpu"
            limit = self._chunk_nbytes or (_CPU_CHUNK_NBYTES if on_host else _DEVICE_CHUNK_NBYTES)
            own = sum(tensor.nbytes for tensor in tensors)
            if not parts or nbytes + own > limit:
                parts.append([])
                nbytes = 0
            parts[-1].append(tensors)
            nbytes += own
        return parts

    def _is_divisible(self) -> bool:
        optimizer = self.optimizer
        hooks = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        return type(optimizer) in _TENSORWISE and not any(hooks)  # a hook is to run once for a step

    def _state_tensors(self, param: Tensor) -> Iterator[Tensor]:
        state = self.optimizer.state
        if param in state:
            yield from (value for value in state[param].values() if isinstance(value, Tensor))

    def _step_chunk(self, chunk: _Chunk) -> None:
        saved = self._save(chunk)
        try:
            self._step_only(chunk)
        except BaseException:
            self._restore(chunk, saved)
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
    def _save(self, chunk: _Chunk) -> _Saved:
        if chunk.tensors:
            torch._foreach_copy_(chunk.copies, chunk.tensors)
        state = self.optimizer.state
        return _Saved(
            [(p, dict(state[p]) if p in state else None) for p in chunk.params],
            [(group, {**group, "params": None}) for group in self.param_groups],
        )

    @torch.no_grad()
    def _restore(self, chunk: _Chunk, saved: _Saved) -> None:
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
        for _ in range(_PUT_BACK_TRIES):
            try:
                torch._foreach_copy_(chunk.tensors, chunk.copies)
                return
            except torch.OutOfMemoryError:
                continue  # it takes no memory: whatever said so, it can be done again

    def _make_scratch(self, parts: list[list[list[Tensor]]]) -> None:
        """See to one piece of memory per device in which the copies of any one chunk have room."""
        needed: dict[torch.device, int] = {}
        for part in parts:
            own: dict[torch.device, int] = {}
            for tensor in (tensor for tensors in part for tensor in tensors):
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


def _room_nbytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
