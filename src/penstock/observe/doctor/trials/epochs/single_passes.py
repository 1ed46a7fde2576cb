"""Evaluations that get one sample after another: how long a sample takes so, and how long as part of a batch.

```
 epoch 1 ──the evaluation gets some samples──▶ epoch 2 ──two of them──▶ epoch 3 ──some batches of them──▶ the end
             what one takes is known                                      what a batch takes is known
```

The batches come last: a program that is not made for them may fail there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler, default_collate
from torch.utils.data.dataloader import _DatasetKind

from penstock.observe.doctor.content_results import SingleCosts
from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trials.batch_source import iterate_unpatched

_SAMPLES, _BATCHES, _SECONDS = 24, 4, 0.4
"""Of a pass that are timed, at most; one more comes before them, whose layers may have to be prepared."""


@dataclass(slots=True)
class _Evaluation:
    epochs: list[int]
    """After which it was begun."""
    sample_s: float | None = None
    batch_s: float | None = None
    batch_size: int = 0
    has_workers: bool = False
    is_tried: bool = False


class SinglePasses:
    """Times evaluations of a program while it goes on after the trials.

    Loaders of the same dataset class and length are taken for the same.

    Args:
        training: the examined loop's loader, whose batches have the size that is tried.
    """

    def __init__(self, training: DataLoader[Any]) -> None:
        self._training = training
        self._evaluations: dict[tuple[str, int], _Evaluation] = {}

    def lacks_batches(self, epochs: int) -> bool:
        """Return whether an evaluation has followed each of so many epochs, and has not been given batches."""
        return any(
            one.sample_s is not None and not one.is_tried and one.epochs == [*range(1, epochs + 1)]
            for one in self._evaluations.values()
        )

    def batches(self, loader: DataLoader[Any], epoch: int, *, is_last: bool) -> Iterator[Any] | None:
        """Return what a pass over `loader` that follows an epoch is to get; None where it is not to be timed.

        `is_last` says that nothing else is to be learned of the program after it.
        """
        if not self._is_single(loader):
            return None
        known = self._evaluations.setdefault((type(loader.dataset).__name__, len(loader)), _Evaluation([]))
        is_first = not known.epochs
        known.epochs.append(epoch)
        if is_first:
            return self._time(loader, known)
        if not is_last or known.is_tried or known.sample_s is None or known.epochs != [*range(1, epoch + 1)]:
            return None
        known.is_tried, known.batch_size = True, self._training.batch_size or 1
        known.has_workers = loader.num_workers > 0
        size = min(known.batch_size, len(loader))
        whole = DataLoader(loader.dataset, size)
        try:
            default_collate([loader.dataset[index] for index in range(size)])
        except Exception:  # samples of several shapes, or a dataset that fails
            return None
        return self._time(whole, known)

    def costs(self) -> tuple[SingleCosts, ...]:
        """Return what is known of the evaluations that follow every epoch."""
        return tuple(
            SingleCosts(
                dataset=dataset,
                samples=samples,
                sample_s=one.sample_s,
                batch_size=one.batch_size,
                batch_s=one.batch_s,
                has_workers=one.has_workers,
            )
            for (dataset, samples), one in self._evaluations.items()
            if one.sample_s is not None and one.batch_s is not None
        )

    def _is_single(self, loader: DataLoader[Any]) -> bool:
        try:
            is_long = len(loader) >= max(THRESHOLDS.single_samples, len(self._training))
        except (TypeError, ValueError, NotImplementedError):
            return False
        is_plain = isinstance(loader.sampler, SequentialSampler) and loader.collate_fn is default_collate
        is_single = loader.batch_size == 1 < (self._training.batch_size or 1)
        has_samples = loader._dataset_kind == _DatasetKind.Map
        return is_long and is_plain and is_single and has_samples and not torch.is_grad_enabled()

    def _time(self, loader: DataLoader[Any], known: _Evaluation) -> Iterator[Any]:
        """Yield some batches, and note what each takes with what the program does with it."""
        is_whole = loader.batch_size != 1
        most = _BATCHES if is_whole else _SAMPLES
        began: proc.ThreadTimes | None = None
        for number, batch in enumerate(iterate_unpatched(loader)):
            if began is None:
                yield batch
                _synchronize()
                began = proc.thread_times()
                continue
            yield batch
            spent = proc.thread_times_since(began)
            if number >= most or spent.wall_s > _SECONDS:
                _synchronize()
                batch_s = proc.thread_times_since(began).busy_s / number
                known.sample_s, known.batch_s = (known.sample_s, batch_s) if is_whole else (batch_s, known.batch_s)
                return


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
