"""SavedGradients: gradients that are there before an attempt, restored after it has failed.

Those that a training step adds to without using them belong to parameters that are in none of the step's optimizers: a
head that another optimizer steps later, or parameters that only the loss function knows. The latter are found once, in
the graph of a loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.distributed.rank_group import local_tensor


class SavedGradients:
    """The gradients of all parameters of some modules, with or without those that an optimizer steps.

    Args:
        modules: whose parameters are meant.
        optimizer: whose parameters are meant too with `with_stepped`, and are not meant without it.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: Optimizer | None, *, with_stepped: bool) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._with_stepped = with_stepped
        self._params: list[Tensor] | None = None
        self._leaves: list[weakref.ref[Tensor]] = []
        self._saved: list[tuple[Tensor, Tensor, Tensor]] = []
        """A parameter, its gradient, and a copy of that."""
        self._is_saved = False
        self.looks_at_graph = True
        """Whether `find_in_graph` should be called with the next loss."""

    def save(self) -> None:
        """Copy those that there are; mostly there are none. May be called again after it has failed."""
        if self._params is None:
            self._params = list(self._meant())
        self._saved = []  # freed first: there may be no room for both
        if self._params or self._leaves:
            self._save([*self._params, *(leaf for one in self._leaves if (leaf := one()) is not None)])
        self._is_saved = True

    def discard(self) -> None:
        """Free the copies, so that `restore` does nothing."""
        self._saved, self._is_saved = [], False

    def find_in_graph(self, loss: Tensor) -> None:
        """Find further parameters in the graph of a loss, before its backward."""
        known = {id(p) for p in (*self._stepped(), *(self._params or ()))}
        found = [leaf for leaf in _leaves_of(loss) if id(leaf) not in known]
        self._save(found)
        self._leaves = [weakref.ref(leaf) for leaf in found]
        self.looks_at_graph = False

    @torch.no_grad()
    def restore(self) -> None:
        """Restore those that were saved last, and drop those that have come since. May be called again."""
        if not self._is_saved:
            return
        for param in self._meant():
            param.grad = None
        for reference in self._leaves:
            if (leaf := reference()) is not None:
                leaf.grad = None
        for param, grad, copy in self._saved:
            if grad.layout is torch.strided:
                local_tensor(grad).copy_(local_tensor(copy))
                param.grad = grad
            else:
                param.grad = copy.clone()

    def _save(self, params: Iterable[Tensor]) -> None:
        self._saved += [(p, p.grad, p.grad.detach().clone()) for p in params if p.grad is not None]

    def _stepped(self) -> list[Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [param for group in groups for param in group["params"]]

    def _meant(self) -> Iterator[Tensor]:
        stepped = self._stepped()
        every: dict[int, Tensor] = {id(p): p for module in self._modules for p in module.parameters()}
        for param in stepped:
            if self._with_stepped:
                every[id(param)] = param
            else:
                every.pop(id(param), None)
        return iter(every.values())


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradients the backward of `loss` adds to."""
    left: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        left += [follower for follower, _ in node.next_functions]
