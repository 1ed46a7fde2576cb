"""Looks at the labels of the first batches: a loop that gets one class at a time learns the last one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from penstock.observe.doctor.probe_results import OneLabel

_NO_LABEL = re.compile(r"id|index|len|size|count|mask|weight|worker|source|time")
"""Of the key of whole numbers that often are all the same."""

_LEAST = 8
"""Samples of a batch: fewer may have one label by chance."""

_MIXED = 3
"""So many times as many samples must come in batches of one label: one may be at the end of a class."""

_KEYS = ("label", "labels", "target", "targets", "class", "classes", "y")


class LabelRecorder:
    """Counts batches that have one label only.

    Labels are numbers, one for each sample: the second part of a pair, an entry with a usual name, or the only entry
    that has whole numbers.
    """

    def __init__(self) -> None:
        self._labels: dict[float, int] = {}
        self._mixed = 0
        self._has_labels = True

    def add(self, batch: Any) -> None:
        """Take a batch into account."""
        labels = labels_of(batch)
        self._has_labels &= labels is not None
        if labels is None or not self._has_labels:
            return
        values = labels.unique().tolist()
        if len(values) == 1 and (labels.numel() >= _LEAST or not self._labels or values[0] in self._labels):
            self._labels[values[0]] = self._labels.get(values[0], 0) + labels.numel()
        else:
            self._mixed += labels.numel()

    def result(self) -> OneLabel | None:
        """Return what batches with one label have; None where most have several, or no label was recognised."""
        samples, is_sorted = sum(self._labels.values()), len(self._labels) > 1
        # Of one label alone, nothing may be mixed: it may be far more frequent than the others.
        is_mixed = samples <= _MIXED * self._mixed if is_sorted else self._mixed > 0
        if not self._has_labels or is_mixed or not samples:
            return None
        return OneLabel(samples=samples, label=next(iter(self._labels)), labels=len(self._labels))


def labels_of(batch: Any) -> torch.Tensor | None:
    """Return the labels of a batch, as one of its tensors has them; None where none is recognised."""
    labels: Any = None
    if isinstance(batch, Mapping):
        numbers = [
            value
            for key, value in batch.items()
            if _is_label(value) and not value.dtype.is_floating_point and not _NO_LABEL.search(str(key))
        ]
        labels = next((batch[key] for key in _KEYS if key in batch), numbers[0] if len(numbers) == 1 else None)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    return labels if _is_label(labels) else None


def _is_label(value: Any) -> bool:
    """Return whether `value` is a batch of single numbers."""
    is_flat = isinstance(value, torch.Tensor) and (value.ndim == 1 or (value.ndim == 2 and value.shape[1] == 1))
    return is_flat and not value.dtype.is_complex
