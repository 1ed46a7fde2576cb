"""Whether a program has made an optimizer yet: what it loops over before only prepares its training; and its steps."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.observe.doctor.trials.loop_frames import goes_on_to_optimize


class OptimizerWatch:
    """Knows whether there is an optimizer, while `patched`, and notes each of their steps.

    Args:
        note_step: is called with an optimizer after its step.
    """

    def __init__(self, note_step: Callable[[Any], None]) -> None:
        self._has_any = False
        self._note_step = note_step

    def precedes_training(self, frame: FrameType) -> bool:
        """Return whether the program of `frame` is to make an optimizer, and has none yet."""
        return not self._has_any and goes_on_to_optimize(frame)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Notice optimizers that are made meanwhile; those that are there already are looked for."""
        optimizer: Any = torch.optim.Optimizer
        gc.collect()  # An ended program's frames can wait in a cycle, with an optimizer that nothing uses.
        self._has_any = any(issubclass(type(one), optimizer) for one in gc.get_objects())
        make = optimizer.__init__

        @functools.wraps(make)
        def make_noticed(own: Any, *arguments: Any, **named: Any) -> None:
            self._has_any = True
            make(own, *arguments, **named)

        optimizer.__init__ = make_noticed
        hook = register_optimizer_step_post_hook(lambda own, *_: self._note_step(own))
        try:
            yield
        finally:
            hook.remove()
            optimizer.__init__ = make
