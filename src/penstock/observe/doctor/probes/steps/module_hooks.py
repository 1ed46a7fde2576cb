"""How many hooks there are on a program's modules: those that an epoch registers again are all called in every step."""

from __future__ import annotations

import gc

import torch

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def count_hooks() -> int:
    """Return the number of forward and backward hooks of all modules that are alive.

    >>> before, layer = count_hooks(), torch.nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(lambda *_: None)
    >>> count_hooks() - before
    1
    """
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    return sum(len(vars(module).get(kind) or ()) for module in modules for kind in _KINDS)
