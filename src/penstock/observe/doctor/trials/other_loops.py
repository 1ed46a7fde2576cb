"""The loops of a program that are not examined, such as a validation: how often they begin, and what that takes."""

from __future__ import annotations

import contextlib
import statistics
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.probe_results import OtherLoop, RepeatedPass

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


@dataclass
class _Passes:
    batches: int
    began_at: list[int] = field(default_factory=list)
    batches_s: list[float] = field(default_factory=list)
    has_gradients: bool = True


class RepeatedPasses:
    """Counts the passes over other loaders that begin in the middle of the examined loop.

    Loaders of the same dataset class and length are taken for the same.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[str, int], _Passes] = {}

    def note_pass(self, loader: DataLoader[Any], step: int) -> None:
        """Note that a pass begins after so many steps of the examined loop."""
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):  # a stream without a length
            key = type(loader.dataset).__name__, len(loader)
            known = self._passes.setdefault(key, _Passes(batches=len(loader)))
            known.began_at.append(step)
            known.has_gradients &= torch.is_grad_enabled()

    def note_batch(self, loader: DataLoader[Any], seconds: float) -> None:
        """Note what one batch of such a pass takes, with what the program does with it."""
        with contextlib.suppress(KeyError, TypeError, ValueError, NotImplementedError):
            self._passes[type(loader.dataset).__name__, len(loader)].batches_s.append(seconds)

    def results(self) -> tuple[RepeatedPass, ...]:
        """Return those that were seen at least twice."""
        return tuple(
            RepeatedPass(
                dataset=dataset,
                batches=known.batches,
                batch_s=statistics.median(known.batches_s),
                passes=len(known.began_at),
                steps_between=(known.began_at[-1] - known.began_at[0]) / (len(known.began_at) - 1),
                has_gradients=known.has_gradients,
            )
            for (dataset, _), known in self._passes.items()
            if len(known.began_at) > 1 and known.batches_s
        )
