"""What comparing indices of samples returns: frozen data, without any judgement. See `contents`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Extent = Literal["partly", "inside", "same"]
"""How much of an evaluation the training has, too: some of it; all of it, and more; or exactly the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSamples:
    """Samples that the examined loop and an evaluation both have."""

    loader: str
    """The evaluation's loader: its name in the program, or its dataset's class."""

    dataset: str
    """The class of the dataset that the examples are of."""

    samples: int
    """How many of the evaluation's samples the training has, too, of those that were compared."""

    compared: int
    """How many of the evaluation's samples were compared."""

    trained: int
    """With how many of the training's."""

    extent: Extent
    """How much of the evaluation they are, of what was compared."""

    examples: tuple[int, ...]
    """Some of their indices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrders:
    """Epochs of the examined loop that all have the same order."""

    sampler: str
    """The class of the sampler."""

    epochs: int
    """How many were compared."""

    is_sorted: bool
    """Whether their order is that of the dataset."""

    is_meant_to_change: bool
    """Whether the sampler is one of torch's that shuffle."""

    is_all: bool
    """Whether the program has no other epochs, or three were the same: two may belong together."""
