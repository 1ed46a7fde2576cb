"""CopiedStep: an optimizer's step from a copy of all that can be reached from it, undone if it fails.

That takes as much memory again as parameters, gradients and moments, and the time to read and write them. Where the
device has no room for the copies, they are made on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.memory.optimizer.resume_optimizer import PartialStepError
from penstock.memory.recovery.out_of_memory import attempt, retry
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.state_tree import StateTree

_HOST = torch.device("cpu")


class CopiedStep:
    """Steps `optimizer`, which may be anybody's. Random numbers are drawn again as the first time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: list[Tensor] = []

    def run(self) -> None:
        """Step. After an error all is as before, and it can be called again.

        Raises:
            PartialStepError: the step failed, and cannot be undone.
        """
        tree = StateTree(self._optimizer)
        dense = [tensor for tensor in tree.tensors if tensor.layout is torch.strided]
        sparse = [tensor for tensor in tree.tensors if tensor.layout is not torch.strided]
        self._copy(dense)
        versions = [tensor._version for tensor in sparse]
        before = RandomState.now({tensor.device for tensor in dense if tensor.device.type not in ("cpu", "meta")})
        try:
            self._optimizer.step()
        except BaseException as error:
            if tree.unknown:
                names = ", ".join(sorted({kind.__qualname__ for kind in tree.unknown}))
                raise PartialStepError(
                    f"{error}; {type(self._optimizer).__name__} keeps things that cannot be copied: {names}"
                ) from error
            if versions != [tensor._version for tensor in sparse]:
                raise PartialStepError(str(error)) from error
            tree.restore()
            if retry(lambda: self._restore(dense)).failure is not None:
                raise PartialStepError(str(error)) from error
            before.restore()
            raise

    def free(self) -> None:
        """Free the copies, which are else kept for the next step."""
        self._copies = []

    @torch.no_grad()
    def _copy(self, tensors: list[Tensor]) -> None:
        fitting = len(self._copies) == len(tensors) and all(map(_is_like, self._copies, tensors))
        if not fitting:
            self.free()  # at first: there may be no room for both
            made = attempt(lambda: [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]).value
            self._copies = made or [torch.empty_like(one, requires_grad=False, device=_HOST) for one in tensors]
        if tensors:
            torch._foreach_copy_(self._copies, tensors)

    @torch.no_grad()
    def _restore(self, tensors: list[Tensor]) -> None:
        pairs = zip(tensors, self._copies, strict=True)
        # An expanded tensor cannot be written to, so it has not changed.
        own = [pair for pair in pairs if torch._debug_has_internal_overlap(pair[0]) != 1]
        if own:
            torch._foreach_copy_([tensor for tensor, _ in own], [copy for _, copy in own])


def _is_like(copy: Tensor, tensor: Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.device in (tensor.device, _HOST)
