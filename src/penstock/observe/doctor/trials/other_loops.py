"""The loops of a program that are not examined, such as a validation: how often they begin, and what that takes."""

from __future__ import annotations

import statistics
import weakref
from typing import Any

from torch.utils.data import DataLoader

from penstock.observe.doctor.probe_results import OtherLoop

_Kind = tuple[str, int, float]


class OtherLoops:
    """Counts the starts of workers; loaders of the same dataset class and number of workers are taken for the same."""

    def __init__(self) -> None:
        self._starts_s: dict[_Kind, list[float]] = {}
        self._loaders: dict[_Kind, int] = {}
        self._seen: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()

    def note_start(self, loader: DataLoader[Any], startup_s: float, batches_between: float = 0.0) -> None:
        """Note that the first batch of a pass over `loader` came after `startup_s`.

        `batches_between` is the length of an epoch of the examined loop, for a pass that follows one.
        """
        is_new = loader not in self._seen
        if not loader.num_workers or (loader.persistent_workers and not is_new):
            return
        self._seen.add(loader)
        key = type(loader.dataset).__name__, loader.num_workers, batches_between
        self._starts_s.setdefault(key, []).append(startup_s)
        self._loaders[key] = self._loaders.get(key, 0) + is_new

    def results(self) -> tuple[OtherLoop, ...]:
        """Return what was counted."""
        return tuple(
            OtherLoop(
                dataset=dataset,
                num_workers=workers,
                starts=len(starts_s),
                loaders=self._loaders[dataset, workers, between],
                startup_s=statistics.median(starts_s),
                batches_between=between,
            )
            for (dataset, workers, between), starts_s in self._starts_s.items()
        )


def length_of(loader: DataLoader[Any]) -> int | None:
    """Return how many batches a loader has; None for a stream without a length."""
    try:
        return len(loader)
    except (TypeError, ValueError, NotImplementedError):
        return None
