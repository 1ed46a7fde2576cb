"""What comparing samples returns: frozen data, without any judgement. See `contents`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldType:
    """The type of one field in one sample."""

    name: str
    """As in "float32"; Python's numbers are "int", "float" and "bool"."""

    index: object
    """Of the sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeChange:
    """A field whose type is not the same in all samples."""

    field: str
    """Its place in a sample, as in "[1]" or "['score']"; empty where a sample is one value."""

    types: tuple[FieldType, ...]
    """Each type, with the first sample that had it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedSamples:
    """Samples that one dataset returned with the same content for different indices, or two of the training's."""

    dataset: str
    """The class of the dataset, or of both."""

    checked: int
    """How many samples were compared."""

    repeated: int
    """How many of them had the content of another one before them."""

    examples: tuple[tuple[int, int], ...]
    """Pairs of indices."""

    parts: tuple[int, int] | None = None
    """Of the datasets that the training consists of, the two that the indices are of, from 0; None: one dataset's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleCosts:
    """What an evaluation in batches of one sample takes, and what it took with larger ones, beside each epoch."""

    dataset: str
    """The class of its dataset."""

    samples: int
    """Of a pass."""

    sample_s: float
    """For each, with what the program does with it."""

    batch_size: int
    """Of the batches that it was given."""

    batch_s: float
    """For each of these, which were loaded in the training process."""

    has_workers: bool = False
    """Whether its own loader has workers, which may load them sooner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleSamples:
    """An evaluation in batches of one sample, while the training has larger ones."""

    loader: str
    """The evaluation's loader: its name in the program, or its dataset's class."""

    samples: int
    """Of a pass."""

    training_batches: int
    """Of an epoch of the examined loop."""

    costs: SingleCosts | None = None
    """None where the program did not begin enough epochs, or could not handle larger batches."""


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

    training_size: int
    """How many the training has; one that it has several times counts once."""

    extent: Extent
    """How much of the evaluation they are, of what was compared."""

    examples: tuple[tuple[int, int], ...]
    """Index for the training, index for the evaluation."""

    by_content: bool = False
    """Whether they were compared by what they hold; otherwise by their indices."""


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
