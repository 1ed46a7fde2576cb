"""Whether a program has made an optimizer yet: what it loops over before only prepares its training; and its steps."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from penstock.observe.doctor.probes.frame_variables import variables_of
from penstock.observe.doctor.trials.loop_frames import goes_on_to_optimize, users_frames

_SEALED = (torch.Tensor, np.ndarray, str, bytes, type, CodeType, FrameType, ModuleType, DataLoader, Dataset)
"""What keeps no optimizer that a program trains with."""

_MOST_VALUES = 20_000


class OptimizerWatch:
    """Knows whether there is an optimizer, and how many steps they have made, while `patched`."""

    def __init__(self) -> None:
        self._has_made_one = False
        self.steps = 0
        self._first_step_at = 0.0
        self._earlier: list[weakref.ref[Any]] = []
        """Optimizers that were there before: a notebook's, or those of programs that have ended."""

    def trains_without_loader(self, seconds: float) -> bool:
        """Return whether optimizers have been at work for so long, of which the caller has seen no loop."""
        return self.steps > 1 and time.perf_counter() - self._first_step_at > seconds

    def _note_step(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self._first_step_at = time.perf_counter()

    def precedes_training(self, frame: FrameType) -> bool:
        """Return whether the program of `frame` is to make an optimizer, and has none yet."""
        if self._has_made_one or not goes_on_to_optimize(frame):
            return False
        earlier = {id(one) for known in self._earlier if (one := known()) is not None}
        return not (earlier and _lead_to(users_frames(frame), earlier))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Notice optimizers that are made meanwhile; those that are there already are looked for."""
        optimizer: Any = torch.optim.Optimizer
        self._earlier = [weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), optimizer)]
        make = optimizer.__init__

        @functools.wraps(make)
        def make_noticed(own: Any, *arguments: Any, **named: Any) -> None:
            self._has_made_one = True
            make(own, *arguments, **named)

        optimizer.__init__ = make_noticed
        hook = register_optimizer_step_post_hook(lambda *_: self._note_step())
        try:
            yield
        finally:
            hook.remove()
            optimizer.__init__ = make


def _lead_to(frames: list[FrameType], wanted: set[int]) -> bool:
    """Return whether the variables of functions, and what their code names of their modules, lead to an object.

    Args:
        frames: the functions that run.
        wanted: the `id` of each object that will do.
    """
    left = deque[Any]()
    for frame in frames:
        left += [*variables_of(frame).values()]
        left += _named_globals(frame.f_code, frame.f_globals)
    seen: dict[int, Any] = {}  # held: another object could get its number
    while left and len(seen) < _MOST_VALUES:
        one = left.popleft()
        if id(one) in wanted:
            return True
        if id(one) in seen or issubclass(type(one), _SEALED):
            continue
        seen[id(one)] = one
        if issubclass(type(one), FunctionType):
            left += [one.__closure__, one.__defaults__, one.__kwdefaults__]
            left += _named_globals(one.__code__, one.__globals__)
        else:
            left += filter(gc.is_tracked, gc.get_referents(one))  # a list may have millions of numbers
    return False


def _named_globals(code: CodeType, variables: Mapping[str, Any]) -> list[Any]:
    return [variables[name] for name in code.co_names if name in variables]
