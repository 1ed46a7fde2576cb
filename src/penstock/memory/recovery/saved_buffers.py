"""SavedBuffers: the buffers of modules, saved before an attempt and restored after it has failed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SavedBuffers:
    """The buffers of modules (running statistics and the like), saved and restored.

    The copies are allocated by the first `save` and kept for the next. A buffer that a module has replaced by another
    tensor is restored as the object that it was; one that a module has added since is removed.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = [part for module in modules for part in module.modules()]
        self._buffers_by_module: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._saved: list[Tensor] = []
        self._copies: list[Tensor] = []

    def save(self) -> None:
        """Copy them. May be called again after it has failed."""
        self.discard()
        by_module = [(module, dict(module._buffers)) for module in self._modules]
        saved = [buffer for _, buffers in by_module for buffer in buffers.values() if buffer is not None]
        if [(b.shape, b.dtype, b.device) for b in saved] != [(c.shape, c.dtype, c.device) for c in self._copies]:
            self._copies = []  # freed first: there may be no room for both
            self._copies = [torch.empty_like(buffer) for buffer in saved]
        if saved:
            torch._foreach_copy_(self._copies, saved)
        self._buffers_by_module, self._saved = by_module, saved

    def discard(self) -> None:
        """Forget what was saved, so that `restore` does nothing."""
        self._buffers_by_module, self._saved = [], []

    def restore(self) -> None:
        """Restore what was saved last. May be called again after it has failed."""
        if self._saved:
            with torch.no_grad():
                torch._foreach_copy_(self._saved, self._copies)
        for module, buffers in self._buffers_by_module:
            module._buffers.clear()
            module._buffers.update(buffers)
