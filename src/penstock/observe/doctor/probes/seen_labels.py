"""Looks at the labels of the first batches: a loop that gets one class only learns that class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.observe.doctor.probe_results import OneLabel

_KEYS = ("label", "labels", "target", "targets", "class", "classes", "y")


class LabelRecorder:
    """Counts labels until a second value appears.

    Labels are whole numbers, one for each sample: the second part of a pair, or an entry with a usual name.
    """

    def __init__(self) -> None:
        self._values: set[int] = set()
        self._samples = 0
        self._has_labels = True

    def add(self, batch: Any) -> None:
        """Take a batch into account."""
        if not self._has_labels or len(self._values) > 1:
            return
        labels = _labels_of(batch)
        if labels is None:
            self._has_labels = False
            return
        self._samples += labels.numel()
        self._values.update(labels.unique().tolist())

    def result(self) -> OneLabel | None:
        """Return the only label that was seen; None where there were others, or none was recognised."""
        if not self._has_labels or len(self._values) != 1:
            return None
        return OneLabel(samples=self._samples, label=next(iter(self._values)))


def _labels_of(batch: Any) -> torch.Tensor | None:
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in _KEYS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    is_labels = (
        isinstance(labels, torch.Tensor)
        and labels.ndim == 1
        and labels.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool)
    )
    return labels if is_labels else None
