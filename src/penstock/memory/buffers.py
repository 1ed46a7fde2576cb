"""The model's buffers, put back as they were before a failed attempt changed them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Buffers:
    """The model's buffers (running statistics and the like), saved and put back.

    Memory for the copies is taken when it is first needed, and kept. A buffer that the model replaced by another
    tensor is put back as the object that it was, and one that it has made since is taken away.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._places: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._held: list[Tensor] = []
        self._copies: list[Tensor] = []

    def save(self) -> None:
        """Copy them. May be called again after it has failed."""
        self.forget()
        places = [(module, dict(module._buffers)) for module in self._modules]
        held = [buffer for _, buffers in places for buffer in buffers.values() if buffer is not None]
        if [(b.shape, b.dtype, b.device) for b in held] != [(c.shape, c.dtype, c.device) for c in self._copies]:
            self._copies = []
            self._copies = [torch.empty_like(buffer) for buffer in held]
        if held:
            torch._foreach_copy_(self._copies, held)
        self._places, self._held = places, held

    def forget(self) -> None:
        """Let what was saved be obsolete: from now on there is nothing to put back."""
        self._places, self._held = [], []

    def restore(self) -> None:
        """Put back what was saved last. May be called again after it has failed."""
        if self._held:
            with torch.no_grad():
                torch._foreach_copy_(self._held, self._copies)
        for module, buffers in self._places:
            module._buffers.clear()
            module._buffers.update(buffers)
