"""ChunkedStep: an optimizer's step in chunks of parameters, each of which is undone if it fails.

What a chunk will change is copied to a scratch that all chunks share, and copied back if the chunk fails. Chunks that
are done stay done; `run` called again resumes with the others. Small chunks also keep the optimizer's temporaries
small. An optimizer with hooks is stepped in one chunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.core.units import round_up
from penstock.memory.optimizer.optimizer_state import (
    SavedOptimizerState,
    changed_tensors,
    has_step_hooks,
    stepped_params,
)
from penstock.memory.optimizer.resume_optimizer import PartialStepError

_CPU_CHUNK_NBYTES = 4 << 20
_DEVICE_CHUNK_NBYTES = 256 << 20
_ALIGNMENT_NBYTES = 64
_RESTORE_TRIES = 3

_Changed = tuple[Tensor, list[Tensor]]
"""A parameter, and all tensors that its step changes."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Parameters that are stepped together, what their step changes, and room for a copy of that."""

    params: list[Tensor]
    dense: list[Tensor]
    copies: list[Tensor]
    sparse: list[Tensor]
    """What may grow, and so has no room for a copy: it must not have changed when the chunk is undone."""


class ChunkedStep:
    """Steps `optimizer` chunk by chunk.

    Args:
        optimizer: one of torch's that treat each parameter by itself.
        chunk_nbytes: about how many bytes of parameters and state to step at a time; by default less for the CPU
            than for an accelerator.
    """

    def __init__(self, optimizer: Optimizer, chunk_nbytes: int | None = None) -> None:
        self._optimizer = optimizer
        self.chunk_nbytes = chunk_nbytes
        self._scratch: dict[torch.device, Tensor] = {}
        self._left: deque[_Chunk] | None = None
        """Chunks of the current step that are not done; None between steps."""

    def run(self) -> None:
        """Step the chunks that are left. After an out-of-memory, call it again to resume.

        Raises:
            torch.OutOfMemoryError: memory ran out; the chunk in question is as before.
            PartialStepError: a chunk failed and cannot be undone.
        """
        if self._left is None:
            self._left = deque(self._make_chunks())
        while self._left:
            self._step_chunk(self._left[0])
            self._left.popleft()
        self._left = None

    # ── chunks ──────────────────────────────────────────────────────────────────────────────────────────────

    def _make_chunks(self) -> list[_Chunk]:
        optimizer = self._optimizer
        groups = self._group([(p, changed_tensors(optimizer, [p])) for p in stepped_params(optimizer)])
        changed = [[tensor for _, tensors in group for tensor in tensors] for group in groups]
        dense = [[tensor for tensor in tensors if tensor.layout is torch.strided] for tensors in changed]
        sparse = [[tensor for tensor in tensors if tensor.layout is not torch.strided] for tensors in changed]
        self._allocate_scratch(dense)
        return [
            _Chunk([param for param, _ in group], tensors, self._copies_in_scratch(tensors), others)
            for group, tensors, others in zip(groups, dense, sparse, strict=True)
        ]

    def _group(self, every: list[_Changed]) -> list[list[_Changed]]:
        """Cut the list of parameters, each with what its step changes, into groups of about `chunk_nbytes`."""
        if has_step_hooks(self._optimizer):
            return [every]
        groups: list[list[_Changed]] = []
        nbytes = 0
        for param, tensors in every:
            on_host = param.device.type == "cpu"
            limit = self.chunk_nbytes or (_CPU_CHUNK_NBYTES if on_host else _DEVICE_CHUNK_NBYTES)
            own = sum(tensor.nbytes for tensor in tensors)
            if not groups or nbytes + own > limit:
                groups.append([])
                nbytes = 0
            groups[-1].append((param, tensors))
            nbytes += own
        return groups

    def _allocate_scratch(self, changed: list[list[Tensor]]) -> None:
        """Allocate one tensor per device with room for the copies of any one chunk."""
        needed: dict[torch.device, int] = {}
        for tensors in changed:
            own: dict[torch.device, int] = {}
            for tensor in tensors:
                own[tensor.device] = own.get(tensor.device, 0) + _aligned_nbytes(tensor)
            for device, nbytes in own.items():
                needed[device] = max(needed.get(device, 0), nbytes)
        for device, nbytes in needed.items():
            if device not in self._scratch or self._scratch[device].numel() < nbytes:
                self._scratch.pop(device, None)
                self._scratch[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _copies_in_scratch(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return a view of the scratch for a copy of each tensor, one behind the other."""
        copies, offsets = [], dict.fromkeys(self._scratch, 0)
        for tensor in tensors:
            start = offsets[tensor.device]
            flat = self._scratch[tensor.device][start : start + tensor.nbytes].view(tensor.dtype)
            copies.append(flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride()))
            offsets[tensor.device] = start + _aligned_nbytes(tensor)
        return copies

    # ── one chunk ───────────────────────────────────────────────────────────────────────────────────────────

    def _step_chunk(self, chunk: _Chunk) -> None:
        if chunk.dense:
            with torch.no_grad():
                torch._foreach_copy_(chunk.copies, chunk.dense)
        saved = SavedOptimizerState.of(self._optimizer, chunk.params)
        versions = [tensor._version for tensor in chunk.sparse]
        try:
            self._step_only(chunk.params)
        except BaseException as error:
            if versions != [tensor._version for tensor in chunk.sparse]:
                raise PartialStepError(str(error)) from error
            self._undo(chunk, saved)
            raise

    def _step_only(self, params: list[Tensor]) -> None:
        """Step with the optimizer seeing these parameters and no others."""
        every = self._optimizer.param_groups
        whole = [group["params"] for group in every]
        mine = set(map(id, params))
        try:
            for group in every:
                group["params"] = [p for p in group["params"] if id(p) in mine]
            self._optimizer.param_groups = [group for group in every if group["params"]]
            self._optimizer.step()
        finally:
            for group, kept in zip(every, whole, strict=True):
                group["params"] = kept
            self._optimizer.param_groups = every

    @torch.no_grad()
    def _undo(self, chunk: _Chunk, saved: SavedOptimizerState) -> None:
        saved.restore(self._optimizer)
        for _ in range(_RESTORE_TRIES):
            try:
                torch._foreach_copy_(chunk.dense, chunk.copies)
                return
            except torch.OutOfMemoryError:
                continue  # a copy between two tensors that exist needs no memory, so it can be retried


def _aligned_nbytes(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, _ALIGNMENT_NBYTES)
