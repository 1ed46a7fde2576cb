"""Worker-dependence detection: does a sample depend on the worker that makes it?

torch gives batch k to worker k mod n, and a program may rely on it: its random augmentations come from the worker's
own random state, or it asks `get_worker_info()`. Then penstock keeps torch's assignment, so that the same seed gives
the same batches as torch's DataLoader, bit for bit. The samples of other datasets are the same in any worker, and a
free worker may take the next task.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils

from penstock.loader.workers.worker_random_states import set_states

_EVERY = 8
"""After its first tasks, a worker's random states are compared only after every eighth, because it takes 40 µs."""


class DependenceDetector:
    """Watches one worker process: its random states, and reads of `get_worker_info()` and `torch.initial_seed()`."""

    def __init__(self) -> None:
        self._reason = ""
        """What the dataset has read since the last `detect`."""
        self._tasks = 0
        self._states = self._digest_states()
        original = torch.initial_seed

        def initial_seed() -> int:
            self._reason = "the dataset reads torch.initial_seed()"
            return original()

        torch.initial_seed = torch.random.initial_seed = initial_seed

    def watch_info(self, info: Any) -> Any:
        """Return a copy of `info` (torch's WorkerInfo) that reports being read to this detector."""
        detector = self

        class DetectingWorkerInfo(type(info)):  # type: ignore[misc]
            __slots__ = ()

            def __getattribute__(self, name: str) -> Any:
                if name in ("id", "num_workers", "seed"):
                    detector._reason = "the dataset reads get_worker_info()"
                return super().__getattribute__(name)

        DetectingWorkerInfo.__name__ = DetectingWorkerInfo.__qualname__ = type(info).__name__
        watched = object.__new__(DetectingWorkerInfo)
        for name in ("id", "num_workers", "seed", "dataset", "rng", "worker_method"):
            if hasattr(info, name):
                object.__setattr__(watched, name, object.__getattribute__(info, name))
        return watched

    def detect(self) -> str:
        """Return why the samples made since the last call depend on their worker; an empty string if they do not."""
        self._tasks += 1
        if self._reason:
            reason, self._reason = self._reason, ""
            return reason
        if self._tasks > _EVERY and self._tasks % _EVERY:
            return ""
        states = self._digest_states()
        before, self._states = self._states, states
        for name, old, new in zip(("torch", "random", "numpy.random"), before, states, strict=True):
            if old != new:
                return f"the samples draw from {name}'s state"
        return ""

    def rewind(self, states: Any) -> None:
        """Restore the random states to `states`, and forget what has been read."""
        set_states(states)
        self._states = self._digest_states()
        self._reason = ""

    def _digest_states(self) -> tuple[bytes, Any, Any]:
        position = np.random.get_state(legacy=False)
        return (
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            (position["state"]["key"].tobytes(), position["state"]["pos"], position["has_gauss"]),
        )


def install_info(info: Any) -> None:
    """Make `info` what `torch.utils.data.get_worker_info()` returns in this process."""
    _utils.worker._worker_info = info
