"""Whether a program has an optimizer yet: what it loops over before that only prepares its training; and its steps."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_LOOK_STEPS = 4


class OptimizerWatch:
    """Knows whether there is an optimizer, and how many steps they have made, while `patched`."""

    def __init__(self) -> None:
        self.has_any = False
        """Whether there is one: of the program's, or one that was there before, as a notebook's."""
        self.steps = 0
        self._first_step_at = 0.0

    def trains_without_loader(self, seconds: float, since: float) -> bool:
        """Return whether optimizers have been at work for so long since then, when a loader was last used.

        More steps than tell a loop from a look (see `TrialScheduler`) have to be seen: a program that waits for a
        processor in the loop after a look trains no less with a loader.
        """
        return self.steps > _LOOK_STEPS and time.perf_counter() - max(self._first_step_at, since) > seconds

    def _note_step(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self._first_step_at = time.perf_counter()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Notice optimizers that are made meanwhile, and their steps."""
        optimizer: Any = torch.optim.Optimizer
        self.has_any = any(issubclass(type(one), optimizer) for one in gc.get_objects())
        make = optimizer.__init__

        @functools.wraps(make)
        def make_noticed(own: Any, *arguments: Any, **named: Any) -> None:
            self.has_any = True
            make(own, *arguments, **named)

        optimizer.__init__ = make_noticed
        hook = register_optimizer_step_post_hook(lambda *_: self._note_step())
        try:
            yield
        finally:
            hook.remove()
            optimizer.__init__ = make
