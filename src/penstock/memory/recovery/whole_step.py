"""WholeStep: a step of an optimizer that nothing is known about. One that fails is undone, whatever it has changed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.memory.recovery.attempt import retry
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.resume_optimizer import PartialStepError
from penstock.memory.recovery.state_tree import StateTree


class WholeStep:
    """Steps `optimizer`, from a copy of everything that can be reached from it.

    The copies are kept for the next step. Random numbers are drawn again as the first time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: list[Tensor] = []

    def run(self) -> None:
        """Step. After an out-of-memory all is as before, and it can be called again.

        Raises:
            torch.OutOfMemoryError: memory ran out.
            PartialStepError: the step failed and cannot be undone.
        """
        tree = StateTree(self._optimizer)
        dense = [tensor for tensor in tree.tensors if tensor.layout is torch.strided]
        sparse = [tensor for tensor in tree.tensors if tensor.layout is not torch.strided]
        self._copy(dense)
        versions = [tensor._version for tensor in sparse]
        devices = {tensor.device for tensor in dense if tensor.device.type not in ("cpu", "meta")}
        before = RandomState.now(devices)
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
            if retry(lambda: self._restore(dense)) is not None:
                raise PartialStepError(str(error)) from error
            before.restore()
            raise

    @torch.no_grad()
    def _copy(self, tensors: list[Tensor]) -> None:
        copies = self._copies
        fitting = len(copies) == len(tensors) and all(map(_is_like, copies, tensors))
        if not fitting:
            self._copies = copies = []  # freed first: there may be no room for both
            copies += [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        if tensors:
            torch._foreach_copy_(copies, tensors)

    @torch.no_grad()
    def _restore(self, tensors: list[Tensor]) -> None:
        pairs = zip(tensors, self._copies, strict=True)
        # An expanded tensor cannot be written to, so it has not changed.
        own = [pair for pair in pairs if torch._debug_has_internal_overlap(pair[0]) != 1]
        if own:
            torch._foreach_copy_([tensor for tensor, _ in own], [copy for _, copy in own])


def _is_like(copy: Tensor, tensor: Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.device == tensor.device
