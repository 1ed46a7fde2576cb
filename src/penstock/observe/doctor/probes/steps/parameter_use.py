"""The parameters that a step's layers multiply by: whether they get gradients, change, and belong to an optimizer."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_PRODUCTS = frozenset(
    {
        torch.nn.functional.linear,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.nn.functional.embedding,
    }
)
"""Functions that use the weights of layers."""

ACCUMULATE = (torch.Tensor.backward, torch.autograd.backward)
"""Functions that add to the gradients of parameters."""

_CALL = torch.nn.Module._call_impl.__code__
_COMPARED = 1024
"""Numbers of each parameter."""


class ParameterUse:
    """Follows parameters over the observed steps."""

    def __init__(self) -> None:
        self.computes_in_double = False
        """Whether a product was one of float64 tensors."""
        self._weights: dict[int, torch.Tensor] = {}  # kept, so that no other has the id of one
        self._before: dict[int, object] = {}
        self._modules: dict[int, list[torch.nn.Module]] = {}
        """Those that were called when a parameter was used first, innermost first."""
        self._have_gradients: set[int] = set()
        self._optimized: set[int] = set()
        self._has_looked = False
        self._is_computed = False
        self._empty_updates: list[bool] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of torch's outside of an optimizer."""
        if func in (*ACCUMULATE, torch.autograd.grad):
            self._note_gradients()
            self._is_computed |= func in ACCUMULATE
        elif func in _PRODUCTS:
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            self.computes_in_double |= any(one.dtype is torch.float64 for one in tensors)
            for weight in (one if one._base is None else one._base for one in tensors):
                if isinstance(weight, torch.nn.Parameter) and weight.requires_grad:
                    self._note_weight(weight)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters that an optimizer has, and whether none of them has gradients when it begins its step."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._optimized.update(map(id, weights))
        if self._is_computed and any(id(weight) in self._have_gradients for weight in weights):
            self._empty_updates.append(not any(_has_gradient(weight) for weight in weights))

    def end_step(self) -> None:
        """Note which parameters have gradients at the end of a step, and which optimizers there are."""
        self._note_gradients()
        self._is_computed = False
        if not self._has_looked and not self._weights.keys() <= self._optimized:
            self._has_looked = True  # once: there may be millions of objects
            for one in gc.get_objects():  # an optimizer may wait for many batches, or for another epoch
                if issubclass(type(one), torch.optim.Optimizer):
                    weights = {id(weight) for group in one.param_groups for weight in group["params"]}
                    self._optimized |= weights if weights & self._weights.keys() else set()

    @property
    def weights(self) -> Collection[torch.Tensor]:
        """The parameters that layers used so far."""
        return self._weights.values()

    @property
    def parameters(self) -> int:
        """How many numbers these parameters have."""
        return sum(weight.numel() for weight in self._weights.values())

    @property
    def updates_nothing(self) -> bool:
        """Whether gradients were gone each time that an optimizer was to use them."""
        return len(self._empty_updates) > 1 and all(self._empty_updates)

    def untrained(self) -> int:
        """Return how many of them got gradients and are as they were, if others are not."""
        return sum(weight.numel() for weight in self._untrained())

    def left_out(self) -> tuple[str, ...]:
        """Return the shapes of those that are untrained, in training mode and in a model of which others are optimized.

        A model that only judges another one has no parameters in its optimizer, or is in evaluation mode.
        """
        found = [
            weight for weight in self._untrained() if id(weight) not in self._optimized and self._is_in_model(weight)
        ]
        return tuple(str(list(weight.shape)) for weight in found)

    def _note_gradients(self) -> None:
        self._have_gradients |= {key for key, weight in self._weights.items() if weight.grad is not None}

    def _is_in_model(self, weight: torch.Tensor) -> bool:
        modules = self._modules.get(id(weight), [])
        is_optimized = any(id(one) in self._optimized for module in modules[1:] for one in module.parameters())
        return is_optimized and modules[0].training

    def _untrained(self) -> list[torch.Tensor]:
        known = {key for key, state in self._before.items() if state is not None}
        same = {key for key in known if _state_of(self._weights[key]) == self._before[key]}
        if known == same:
            return []
        return [weight for key, weight in self._weights.items() if key in same & self._have_gradients]

    def _note_weight(self, weight: torch.Tensor) -> None:
        if id(weight) not in self._weights:
            self._weights[id(weight)], self._before[id(weight)] = weight, _state_of(weight)
            self._modules[id(weight)] = list(called_modules())


def called_modules() -> Iterator[torch.nn.Module]:
    """Yield the modules that are called now, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def numbers_of(tensor: torch.Tensor | None) -> bytes:
    """Return some of a tensor's numbers, at most 2048 over all of it; empty without a tensor."""
    if tensor is None:
        return b""
    whole = tensor.detach()
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    some = whole.reshape(-1)[:: max(1, whole.numel() // _COMPARED)]
    # NumPy gets a copy: a storage that it has seen cannot be resized any longer.
    return some.to("cpu", torch.float64, copy=True).numpy().tobytes()


def _has_gradient(weight: torch.Tensor) -> bool:
    return weight.grad is not None and (weight.grad.is_sparse or bool(weight.grad.any()))


def _state_of(weight: torch.Tensor) -> object:
    """Return what changes when a parameter is updated, in place or through `.data`."""
    try:
        return weight._version, numbers_of(weight)
    except Exception:  # a tensor of torch.func, of several devices, without values or a version
        return None
