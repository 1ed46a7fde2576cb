"""SavedBuffers: the buffers of modules, saved before an attempt and restored after it has failed."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_buffers_of = operator.attrgetter("_buffers")
_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")


class SavedBuffers:
    """The buffers of modules (running statistics and the like), saved and restored.

    The copies are allocated by the first `save` and kept for the next. A buffer that a module has replaced by another
    tensor is restored as the object that it was; one that a module has added since is removed.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = [part for module in modules for part in module.modules()]
        self._held: list[Any] = []
        """The names and buffers of all modules when they were last walked: while they are the same, so is the rest."""
        self._by_module: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._saved_forms: tuple[list[torch.Size], list[torch.dtype]] = [], []
        self._is_saved = False

    def save(self) -> None:
        """Copy them. May be called again after it has failed."""
        self._is_saved = False
        dicts = [*filter(None, map(_buffers_of, self._modules))]  # most modules have none
        held = [*chain.from_iterable(dicts), *chain.from_iterable(map(dict.values, dicts))]
        is_same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if not is_same or (held and self._forms() != self._saved_forms):  # one may be resized in place
            self._walk(held)
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)
        self._is_saved = True

    def discard(self) -> None:
        """Forget what was saved, so that `restore` does nothing."""
        self._is_saved = False

    def restore(self) -> None:
        """Restore what was saved last. May be called again after it has failed."""
        if not self._is_saved:
            return
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._copies)
        for module, buffers in self._by_module:
            module._buffers.clear()
            module._buffers.update(buffers)

    def _walk(self, held: list[Any]) -> None:
        self._held = []
        by_module = [(module, dict(module._buffers)) for module in self._modules]
        self._buffers = [buffer for _, buffers in by_module for buffer in buffers.values() if buffer is not None]
        self._copies = []  # freed first: there may be no room for both
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
        self._by_module, self._saved_forms, self._held = by_module, self._forms(), held

    def _forms(self) -> tuple[list[torch.Size], list[torch.dtype]]:
        return [*map(_shape_of, self._buffers)], [*map(_dtype_of, self._buffers)]
