"""The witness: could the samples tell in which worker they were made?

torch gives batch k to worker k mod n, and a program may rely on it: its random augmentations come from the worker's
own random state, or it asks `get_worker_info()`. Then penstock keeps torch's assignment, so that the same seed gives
the same batches as torch's DataLoader, bit for bit. A dataset that never looks cannot know the difference, and a free
worker may take whatever comes next.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils

_EVERY = 8
"""After its first pieces, a worker's random states are compared only after every eighth: it takes 40 µs."""


class Witness:
    """Watches one worker process: its random states, and who reads `get_worker_info()` or `torch.initial_seed()`."""

    def __init__(self) -> None:
        self._asked = ""
        self._pieces = 0
        self._states = self._read()
        original = torch.initial_seed

        def initial_seed() -> int:
            self._asked = "the dataset reads torch.initial_seed()"
            return original()

        torch.initial_seed = torch.random.initial_seed = initial_seed

    def watched(self, info: Any) -> Any:
        """Return `info` (torch's WorkerInfo) as one that notes who reads it."""
        witness = self

        class WatchedInfo(type(info)):  # type: ignore[misc]
            __slots__ = ()

            def __getattribute__(self, name: str) -> Any:
                if name in ("id", "num_workers", "seed"):
                    witness._asked = "the dataset reads get_worker_info()"
                return super().__getattribute__(name)

        WatchedInfo.__name__ = WatchedInfo.__qualname__ = type(info).__name__
        watched = object.__new__(WatchedInfo)
        for name in ("id", "num_workers", "seed", "dataset", "rng", "worker_method"):
            if hasattr(info, name):
                object.__setattr__(watched, name, object.__getattribute__(info, name))
        return watched

    def evidence(self) -> str:
        """Return what gives the worker away since the last call, or an empty string."""
        self._pieces += 1
        if self._asked:
            evidence, self._asked = self._asked, ""
            return evidence
        if self._pieces > _EVERY and self._pieces % _EVERY:
            return ""
        states = self._read()
        before, self._states = self._states, states
        for name, old, new in zip(("torch", "random", "numpy.random"), before, states, strict=True):
            if old != new:
                return f"the samples draw from {name}'s state"
        return ""

    def remember(self) -> Any:
        """Return the random states as they are now, for `rewind`."""
        return torch.get_rng_state(), random.getstate(), np.random.get_state()

    def rewind(self, states: Any) -> None:
        """Put the random states back to `states`."""
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        self._states = self._read()
        self._asked = ""

    def _read(self) -> tuple[bytes, Any, Any]:
        position = np.random.get_state(legacy=False)
        return (
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            (position["state"]["key"].tobytes(), position["state"]["pos"], position["has_gauss"]),
        )


def install_info(info: Any) -> None:
    """Make `info` what `torch.utils.data.get_worker_info()` returns in this process."""
    _utils.worker._worker_info = info
