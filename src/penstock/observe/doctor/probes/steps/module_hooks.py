"""How many hooks there are on a program's modules: those that an epoch registers again are all called in every step."""

from __future__ import annotations

import gc
import weakref

import torch

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleHooks:
    """Counts forward and backward hooks of the modules that are alive when it is made.

    Later ones, as copies of a model that a program keeps of each epoch, have hooks that no step need call.

    >>> layer = torch.nn.Linear(1, 1)
    >>> hooks = ModuleHooks()
    >>> before, handle = hooks.count(), layer.register_forward_hook(lambda *_: None)
    >>> hooks.count() - before
    1
    """

    def __init__(self) -> None:
        self._modules = [weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]

    def count(self) -> int:
        """Return how many there are now."""
        alive = [module for one in self._modules if (module := one()) is not None]
        return sum(len(vars(module).get(kind) or ()) for module in alive for kind in _KINDS)
