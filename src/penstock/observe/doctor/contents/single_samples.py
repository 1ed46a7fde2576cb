"""Evaluations whose loader was made without a batch size: their model gets one sample after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler, default_collate

from penstock.observe.doctor.content_results import SingleCosts, SingleSamples
from penstock.observe.doctor.contents.compare_loaders import Evaluation
from penstock.observe.doctor.thresholds import THRESHOLDS

_COLLATED = 4


def find_single_samples(
    training: DataLoader[Any], evaluations: Iterable[Evaluation], costs: Iterable[SingleCosts] = ()
) -> SingleSamples | None:
    """Return the longest evaluation in batches of one sample whose samples could be one batch; None without one.

    Some of its samples are made: those of other shapes have to come one by one. `costs` are those that are known.
    """
    known = {(one.dataset, one.samples): one for one in costs}
    found: list[SingleSamples] = []
    for one in evaluations:
        with contextlib.suppress(Exception):  # of loaders without a length, and of the user's dataset
            passes = SingleSamples(
                loader=one.name,
                samples=len(one.loader),
                training_batches=len(training),
                costs=known.get((type(one.loader.dataset).__name__, len(one.loader))),
            )
            is_long = passes.samples >= max(THRESHOLDS.single_samples, passes.training_batches)
            if is_long and one.loader.batch_size == 1 < (training.batch_size or 1) and _make_one_batch(one.loader):
                found.append(passes)
    return max(found, key=lambda passes: passes.samples, default=None)


def _make_one_batch(loader: DataLoader[Any]) -> bool:
    if loader.collate_fn is not default_collate or not isinstance(loader.sampler, SequentialSampler):
        return False
    step = max(1, len(loader) // _COLLATED)
    default_collate([loader.dataset[index] for index in range(0, len(loader), step)])
    return True
