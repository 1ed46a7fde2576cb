"""ChunkedStep: an optimizer's step in chunks of parameters, each of which is undone if it fails.

What a chunk will change is copied, and copied back if the chunk fails. Chunks that are done stay done; `run` called
again resumes with the others. Small chunks also keep the optimizer's temporaries small. An optimizer with hooks is
stepped in one chunk.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.memory.optimizer.optimizer_state import (
    SavedOptimizerState,
    changed_tensors,
    has_step_hooks,
    stepped_params,
)
from penstock.memory.optimizer.resume_optimizer import PartialStepError
from penstock.memory.recovery.out_of_memory import retry

CPU_CHUNK_NBYTES = 4 << 20
DEVICE_CHUNK_NBYTES = 256 << 20


class ChunkedStep:
    """Steps `optimizer`, one of torch's that treat each parameter by itself, chunk by chunk."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._left: deque[list[Tensor]] | None = None
        """Chunks of the current step that are not done; None between steps."""

    def run(self) -> None:
        """Step the chunks that are left. After an error the chunk in question is as before: call it again to resume.

        Raises:
            PartialStepError: a chunk failed and cannot be undone.
        """
        if self._left is None:
            self._left = deque(self._make_chunks())
        while self._left:
            self._step_chunk(self._left[0])
            self._left.popleft()
        self._left = None

    def free(self) -> None:
        """Do nothing: copies live as long as their chunk is stepped."""

    def _make_chunks(self) -> list[list[Tensor]]:
        """Cut the list of parameters into groups of which a step changes some bytes each."""
        params = stepped_params(self._optimizer)
        if has_step_hooks(self._optimizer):
            return [params]
        groups: list[list[Tensor]] = []
        nbytes = 0
        for param in params:
            limit = CPU_CHUNK_NBYTES if param.device.type == "cpu" else DEVICE_CHUNK_NBYTES
            changed = changed_tensors(self._optimizer, [param])
            own = sum(tensor.nbytes for tensor in changed if tensor.layout is torch.strided)
            if not groups or nbytes + own > limit:
                groups.append([])
                nbytes = 0
            groups[-1].append(param)
            nbytes += own
        return groups

    def _step_chunk(self, params: list[Tensor]) -> None:
        changed = changed_tensors(self._optimizer, params)
        copies = [tensor.detach().clone() for tensor in changed]
        saved = SavedOptimizerState.of(self._optimizer, params)
        try:
            self._step_only(params)
        except BaseException as error:
            saved.restore(self._optimizer)
            if retry(lambda: _copy(changed, copies)).failure is not None:
                raise PartialStepError(str(error)) from error
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
def _copy(tensors: list[Tensor], copies: list[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)  # one by one: some may be sparse
