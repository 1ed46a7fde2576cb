"""The training steps that exist, for observers: what their models hold on accelerators."""

from __future__ import annotations

import weakref
from typing import Any

from penstock.core.walking import walk
from penstock.memory.accounting.ledger import ModuleBytes, held_on_accelerators

live_steps: weakref.WeakSet[Any] = weakref.WeakSet()
"""Each `TrainStep`; it adds itself."""


def held_by_steps() -> ModuleBytes | None:
    """Return what all models and optimizers of training steps hold on accelerators; None if there is no step.

    Called by a thread that watches a run, seldom: it looks at each parameter.

    Raises:
        RuntimeError: a model, an optimizer's state or the set of steps changed meanwhile.
    """
    steps = {id(step.model): step for step in walk(live_steps)}
    if not steps:
        return None
    every = [held_on_accelerators(step.model, step.optimizer) for step in steps.values()]
    return ModuleBytes(
        weights=sum(one.weights for one in every),
        gradients=sum(one.gradients for one in every),
        optimizer=sum(one.optimizer for one in every),
    )
