"""The loops of a program that are not examined, such as a validation: how often they begin, and what that takes."""

from __future__ import annotations

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
    length: int
    began_at: list[int] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    batches: int = 0
    """That the program took in its first pass."""
    is_known: bool = False
    is_cut: bool = False
    """Whether the first pass took too long to see its end."""
    has_gradients: bool = True


class RepeatedPasses:
    """Counts the passes over other loaders that begin in the middle of the examined loop.

    Loaders of the same dataset class and length are taken for the same. How many batches a pass takes is seen in the
    first one.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[str, int], _Passes] = {}

    def note_pass(self, loader: DataLoader[Any], step: int) -> None:
        """Note that a pass begins after so many steps of the examined loop."""
        length = length_of(loader)
        if length is not None:
            known = self._passes.setdefault((type(loader.dataset).__name__, length), _Passes(length=length))
            known.is_known |= bool(known.began_at)
            known.began_at.append(step)
            known.has_gradients &= torch.is_grad_enabled()

    def note_batches(self, loader: DataLoader[Any], requested: int, batch_s: float) -> None:
        """Note how many batches such a pass has requested, and what each takes with what the program does with it."""
        known = self._known(loader)
        if known is not None:
            known.batches = known.batches if known.is_known else min(requested, known.length)
            known.batch_s[len(known.began_at) - 1 :] = [batch_s]

    def note_cut(self, loader: DataLoader[Any]) -> None:
        """Note that a pass is ended."""
        known = self._known(loader)
        if known is not None:
            known.is_cut |= not known.is_known
            known.is_known = True

    def is_known(self, loader: DataLoader[Any]) -> bool:
        """Return whether it is known how many batches a pass takes, or is not to be found out."""
        known = self._known(loader)
        return known is None or known.is_known

    def results(self) -> tuple[RepeatedPass, ...]:
        """Return those that were seen at least twice."""
        return tuple(
            RepeatedPass(
                dataset=dataset,
                batches=known.length if known.is_cut else known.batches,
                is_whole=not known.is_cut,
                batch_s=statistics.median(known.batch_s),
                passes=len(known.began_at),
                steps_between=(known.began_at[-1] - known.began_at[0]) / (len(known.began_at) - 1),
                has_gradients=known.has_gradients,
            )
            for (dataset, _), known in self._passes.items()
            if len(known.began_at) > 1 and known.batch_s
        )

    def _known(self, loader: DataLoader[Any]) -> _Passes | None:
        return self._passes.get((type(loader.dataset).__name__, length_of(loader) or 0))


def length_of(loader: DataLoader[Any]) -> int | None:
    """Return how many batches a loader has; None for a stream without a length."""
    try:
        return len(loader)
    except (TypeError, ValueError, NotImplementedError):
        return None
