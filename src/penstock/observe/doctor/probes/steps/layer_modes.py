"""Whether the layers of a model that depend on its mode are in training mode while it is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from penstock.observe.doctor.probes.steps.parameter_use import called_modules, numbers_of

_MODES = {
    functional.dropout: (2, True),
    functional.alpha_dropout: (2, False),
    functional.feature_alpha_dropout: (2, False),
    functional.dropout1d: (2, True),
    functional.dropout2d: (2, True),
    functional.dropout3d: (2, True),
    functional.batch_norm: (5, False),
}
"""Functions that depend on the mode of their layer: where `training` stands, and what it is if it is left out."""

_COMPARED = 4
"""So many parameters of a module, the first and the last ones, have to change while it is trained."""


class _Module:
    """The innermost module with parameters around a layer that depends on the mode."""

    def __init__(self, own: list[torch.nn.Parameter], outermost: torch.nn.Module) -> None:
        self._before = [(weight, numbers_of(weight)) for weight in (*own[:_COMPARED], *own[-_COMPARED:])]
        self.outermost = outermost
        """The module that the program calls, in which this one is."""
        self.trains = False
        """Whether the layer, or this module, was in training mode: one without the other is so on purpose."""
        self.is_part = False
        """Whether a module that calls this one was in training mode."""

    @property
    def is_trained(self) -> bool:
        """Whether its parameters have changed since."""
        return all(numbers_of(weight) != before for weight, before in self._before)


class LayerModes:
    """Looks at the modes in which the observed steps call layers."""

    def __init__(self) -> None:
        self._modules: dict[tuple[str, int], tuple[torch.nn.Module, _Module]] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Note a call of torch's outside of an optimizer, and what it `made`."""
        if func not in _MODES or not isinstance(made, torch.Tensor) or not made.requires_grad:
            return
        kind = "batch norm" if func is functional.batch_norm else "dropout"
        around = list(called_modules())
        while around and not any(weight.requires_grad for weight in around[0].parameters()):
            around.pop(0)
        if not around or (kind == "dropout" and not argument(args, kwargs, 1, "p", 0.5) > 0):
            return
        module, *callers = around
        own = [weight for weight in module.parameters() if weight.requires_grad]
        _, seen = self._modules.setdefault((kind, id(module)), (module, _Module(own, around[-1])))
        place, default = _MODES[func]
        seen.trains |= module.training or bool(argument(args, kwargs, place, "training", default))
        seen.is_part |= any(caller.training for caller in callers)

    def trained_models(self) -> tuple[torch.nn.Module, ...]:
        """Return the modules that the program calls in training mode, with such layers in that mode, and trains."""
        models = {id(seen.outermost): seen for _, seen in self._modules.values() if seen.trains and seen.is_trained}
        return tuple(seen.outermost for seen in models.values() if seen.outermost.training)

    def evaluates(self) -> tuple[str, ...]:
        """Return "dropout" and "batch norm", where such layers of a module that is trained are in evaluation mode."""
        found = {kind for (kind, _), (_, seen) in self._modules.items() if not seen.trains and seen.is_trained}
        return tuple(kind for kind in ("dropout", "batch norm") if kind in found)

    def evaluates_whole(self) -> bool:
        """Return whether dropout is so in a model that is in evaluation mode as a whole."""
        return any(
            kind == "dropout" and not seen.trains and not seen.is_part and seen.is_trained
            for (kind, _), (_, seen) in self._modules.items()
        )


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    """Return an argument of a call."""
    return args[place] if len(args) > place else kwargs.get(name, default)
