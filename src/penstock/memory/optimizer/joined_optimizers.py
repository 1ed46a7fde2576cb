"""Several optimizers of one model, taken as one; and optimizers that a training step cannot use."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.memory.optimizer.optimizer_state import is_tensorwise, reject_closure_optimizer
from penstock.memory.recovery.state_tree import StateTree


class JoinedOptimizers(Optimizer):
    """Several optimizers, with the groups and the state of all.

    Args:
        optimizers: at least one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:  # not torch's: that would make groups of its own
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, one optimizer behind the other."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of all; a copy."""
        return {param: state for one in self.optimizers for param, state in one.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all of them, in order."""
        for one in self.optimizers:
            one.step()

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedOptimizers:
        return JoinedOptimizers(copy.deepcopy(self.optimizers, memo))


def as_one_optimizer(given: Optimizer | Sequence[Optimizer], params: Iterable[Tensor]) -> Optimizer:
    """Return an optimizer of a model's parameters, or several of them as one.

    Raises:
        OptionError: one of them is no optimizer, needs a closure, or steps some of `params` that are not in its groups.
    """
    trained = set(map(id, params))
    if isinstance(given, (list, tuple)):
        if not given:
            raise OptionError("the list of optimizers is empty; pass at least one")
        for one in given:
            _check_optimizer(one, trained)
        return given[0] if len(given) == 1 else JoinedOptimizers(given)
    assert not isinstance(given, Sequence)
    _check_optimizer(given, trained)
    return given


def optimizers_of(optimizer: Optimizer | None) -> list[Optimizer]:
    """Return the optimizers that were joined, or the only one."""
    if isinstance(optimizer, JoinedOptimizers):
        return optimizer.optimizers
    return [] if optimizer is None else [optimizer]


def reject_gradient_hooks(params: Sequence[Tensor]) -> None:
    """Raise OptionError where something is called as soon as a parameter has its gradient, as for a step in backward.

    It would be called for each micro-batch, and again after a failure, and what it does cannot be undone.
    """
    for param in params:
        hooks = list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())
        if hooks or hasattr(param, "_in_backward_optimizers"):
            name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__) if hooks else "an optimizer in backward"
            raise OptionError(
                f"a parameter of shape {tuple(param.shape)} has a hook that runs when its gradient is there ({name}). "
                "It would run for each micro-batch, and again after a failure: remove it, step the optimizer by "
                "TrainStep, and change gradients in the optimizer's step"
            )


def _check_optimizer(optimizer: Optimizer, trained: set[int]) -> None:
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise OptionError(
            f"a {type(optimizer).__name__} has no param_groups and step(); pass an optimizer of torch's kind, or the "
            "optimizers that it consists of as a list"
        )
    reject_closure_optimizer(optimizer)
    if is_tensorwise(optimizer):
        return
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for inner in StateTree(optimizer).optimizers:
        reject_closure_optimizer(inner)
        theirs = {id(param) for group in inner.param_groups for param in group["params"]}
        if theirs & trained - own:  # others may have a parameter of their own, for a schedule
            raise OptionError(
                f"a {type(optimizer).__name__} has a {type(inner).__name__} inside, with parameters that are not in "
                "its own param_groups, so their gradients would not be divided or clipped; pass the optimizers that "
                "it consists of as a list"
            )
