"""What a step of an optimizer changes: parameters, tensors of its state, and values that are no tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_map

from penstock.core.errors import OptionError
from penstock.distributed.rank_group import local_tensor
from penstock.memory.model_tensors import state_tensors
from penstock.memory.recovery.out_of_memory import attempt

TENSORWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip
"""torch's optimizers that treat each parameter by itself, so that some of the parameters may be stepped at a time."""
_wrapper = Optimizer.profile_hook_step(len).__code__
_RECORDING: object = _wrapper if _wrapper.co_filename == Optimizer.__init__.__code__.co_filename else object()
"""Of what torch wraps every `step` in; of nothing, where somebody has replaced that."""
_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def reject_closure_optimizer(optimizer: Optimizer | None) -> None:
    """Raise OptionError for an optimizer that evaluates the loss by itself."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("LBFGS evaluates the loss by itself, several times per step; use an optimizer that does not")


def is_tensorwise(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` is known to treat each parameter by itself."""
    return type(optimizer) in TENSORWISE


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether there are hooks, which must run once per step."""
    return bool(
        _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or getattr(optimizer, "_optimizer_step_pre_hooks", None)  # which some that are not torch's lack
        or getattr(optimizer, "_optimizer_step_post_hooks", None)
    )


def step_without_hooks(optimizer: Optimizer) -> Callable[[], object]:
    """Return what `optimizer.step` does when it has no hooks, without the operations that record it in a profile.

    It is `optimizer.step` itself where anybody may see a difference: a profiler is on, or somebody has replaced it.
    """
    recorded: Any = type(optimizer).step
    is_replaced = getattr(optimizer.step, "__func__", None) is not recorded
    if getattr(recorded, "__code__", None) is not _RECORDING or is_replaced or _is_profiled():
        return optimizer.step
    return functools.partial(recorded.__wrapped__, optimizer)


def stepped_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that the next step changes: those with a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def changed_tensors(optimizer: Optimizer, params: list[Tensor]) -> list[Tensor]:
    """Return what a step of `params` changes, by one of torch's optimizers: themselves and their state.

    Of sharded ones it is this rank's part.
    """
    return [*map(local_tensor, params), *state_tensors(optimizer, params)]


@dataclass(frozen=True, slots=True)
class SavedOptimizerState:
    """What of an optimizer's state is no tensor: each parameter's state (None: none yet), each group's options."""

    states: list[tuple[Tensor, dict[str, Any] | None]]
    options: list[tuple[dict[str, Any], dict[str, Any]]]

    @classmethod
    def of(cls, optimizer: Optimizer, params: list[Tensor]) -> SavedOptimizerState:
        """Save the state of `params`, and the options of all groups."""
        state = optimizer.state
        return cls(
            [(p, _copy_containers(state[p]) if p in state else None) for p in params],
            [(group, {**group, "params": None}) for group in optimizer.param_groups],
        )

    def restore(self, optimizer: Optimizer) -> None:
        """Restore the containers; the tensors in them are the same objects, with whatever values they have now."""
        for param, state in self.states:
            if state is None:
                optimizer.state.pop(param, None)
            else:
                optimizer.state[param].clear()
                optimizer.state[param].update(state)
        for group, options in self.options:
            params = group["params"]
            group.clear()
            group.update(options, params=params)


def _copy_containers(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's state, down to lists and dicts inside it; tensors are the same."""
    copied: dict[str, Any] = tree_map(lambda leaf: leaf, dict(state))
    return copied


def nbytes_by_accelerator(params: list[Tensor]) -> dict[torch.device, int]:
    """Return the bytes of `params` on each accelerator: a whole step may need as much for temporaries."""
    needed: dict[torch.device, int] = {}
    for param in params:
        if param.device.type != "cpu":
            needed[param.device] = needed.get(param.device, 0) + param.nbytes
    return needed


def has_room(needed: dict[torch.device, int]) -> bool:
    """Return whether each accelerator has so many bytes free."""
    for device, nbytes in needed.items():
        if attempt(functools.partial(torch.empty, nbytes, dtype=torch.uint8, device=device)).failure is not None:
            return False
    return True
