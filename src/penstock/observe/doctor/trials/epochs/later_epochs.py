"""The epochs that a program begins after its trials, which show what one epoch cannot: whether the order changes.

```
 trials over ──▶ the loop ends ──the program begins epoch 2──▶ one batch, the loop ends ──epoch 3──▶ TrialsDoneError
                     └──────────────── the program ends, or its time is over ──────────────────────▶ (as far as seen)
```

Between two epochs programs validate and save. The trained model is not one to keep, so nothing is written meanwhile:
see `write_guard`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.distributed import DistributedSampler

from penstock.loader.dataloader import DataLoader as PenstockLoader
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.content_results import EpochOrders
from penstock.observe.doctor.contents.origins import drawn_by_copy
from penstock.observe.doctor.probes.steps.parameter_use import numbers_of
from penstock.observe.doctor.trials.epochs.write_guard import WriteGuard
from penstock.observe.doctor.trials.other_loops import length_of
from penstock.observe.doctor.trials.time_budget import TrialsDoneError

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_EPOCHS = 3
"""One that does not change its order every time, as where two passes share an epoch, has changed it by the third."""
_DRAWN = 256
_TIME, _LEAST_S = 0.2, 0.5
"""Of the trials' time, what the program may take to begin its later epochs."""


class LaterEpochs:
    """Compares the orders of a loop's epochs.

    Args:
        loader: the examined loader, before its first epoch.
        seconds: how long the trials may take.
        clock: seconds, monotonic.
    """

    def __init__(self, loader: DataLoader[Any], seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loader = loader
        self._limit_s = max(_LEAST_S, _TIME * seconds)
        self._clock = clock
        self._until = 0.0
        self._has_gradients = torch.is_grad_enabled()
        self._first = order_of(loader)
        self._epochs = 1
        self._is_same = True
        self._is_over = False
        self.guard = WriteGuard()
        self._trained: Sequence[torch.nn.Module] = ()
        self._weights: list[bytes | None] = []
        """Of each of them, numbers of its last parameter when the last epoch began."""
        self.evaluates = False
        """Whether models that were trained in training mode have made a step of a later epoch in evaluation mode."""
        self.is_running = False
        """Whether the trials are over, and the program goes on without them."""
        self.has_ended = False
        """Whether the program has come to its end, so that it has no other epoch."""
        self.has_others = False
        """Whether it begins other loops meanwhile, which may begin after the next epoch again."""

    def begin(self, trained: Sequence[torch.nn.Module] = ()) -> bool:
        """Let the program go on after its trials; return False where its later epochs show nothing.

        Args:
            trained: the models that it has trained so far, in training mode.
        """
        if self._first is None or self.is_running:
            return False
        self._until = self._clock() + self._limit_s
        self.is_running = True
        self._trained = trained
        self.guard.arm()
        return True

    def belongs(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loop over `loader` is another epoch of the examined one."""
        own = self._loader
        return torch.is_grad_enabled() == self._has_gradients and (
            loader is own
            or (
                (type(loader.dataset), type(loader.sampler)) == (type(own.dataset), type(own.sampler))
                and (loader.batch_size, loader.num_workers) == (own.batch_size, own.num_workers)
                and len(loader.dataset) == len(own.dataset)  # type: ignore[arg-type]
            )
        )

    @property
    def epoch_length(self) -> float:
        """Batches per epoch of the examined loader; 0 where it is not known."""
        return length_of(self._loader) or 0

    def add(self, loader: DataLoader[Any]) -> None:
        """Compare the order of an epoch over `loader` that begins.

        Raises:
            TrialsDoneError: it was the last one to be compared.
        """
        self._epochs += 1
        self._weights = [_last(model) for model in self._trained]
        self._is_same = self._is_same and order_of(loader) == self._first
        if not (self._is_same or self.has_others) or self._epochs >= _EPOCHS:
            self._is_over = True
            raise TrialsDoneError

    def note_step(self) -> None:
        """Note that a step of a later epoch is over: a model that it has not changed may be one that is finished."""
        changed = [model for model, before in zip(self._trained, self._weights, strict=True) if _last(model) != before]
        self.evaluates |= bool(changed) and not any(model.training for model in changed)

    def tick(self) -> None:
        """Raise TrialsDoneError if the program takes too long, or was to end and goes on."""
        if self._is_over or self._clock() > self._until:
            raise TrialsDoneError

    def result(self) -> EpochOrders | None:
        """Return the order that all epochs have had; None where it changed, or is not known."""
        first, sampler = self._first, _sampler_of(self._loader)
        if not self._is_same or self._epochs < 2 or first is None:
            return None
        is_sorted = all(one <= other for one, other in pairwise(first))
        return EpochOrders(
            sampler=type(sampler).__name__,
            epochs=self._epochs,
            is_sorted=is_sorted,
            is_meant_to_change=type(sampler) in _SHUFFLING and not is_sorted,
            is_all=self.has_ended or self._epochs >= _EPOCHS,
        )


def _last(model: torch.nn.Module) -> bytes | None:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return numbers_of(weights[-1]) if weights else None


def order_of(loader: DataLoader[Any]) -> tuple[int, ...] | None:
    """Return the first indices that an epoch begun now would have; None where they are not known, or too few.

    >>> order_of(DataLoader(range(9)))
    (0, 1, 2, 3, 4, 5, 6, 7, 8)
    """
    sampler = _sampler_of(loader)
    # penstock's own loader draws orders itself, and counts epochs; only a DistributedSampler is asked by it, too
    is_own = isinstance(loader, PenstockLoader) and type(sampler) not in (DistributedSampler, SequentialSampler)
    if loader._dataset_kind == _DatasetKind.Iterable or is_own:
        return None
    try:
        drawn = drawn_by_copy(_indices_of(loader), loader.dataset, _DRAWN)
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return None
    return tuple(drawn.tolist()) if drawn is not None and len(drawn) >= thresholds.SHUFFLED_SAMPLES else None


def _indices_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", _indices_of(loader))
