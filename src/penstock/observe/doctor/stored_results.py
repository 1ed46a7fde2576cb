"""What was found in the attributes of datasets: frozen data, without any judgement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedData:
    """Stored data that the making of a sample changes, so that the same sample is another one the next time."""

    attribute: str
    """Where it is stored, as in "Cuts.waves"."""

    samples: int
    """Of how many samples this was seen."""

    tried: int
    """How many samples were made again."""

    is_returned: bool
    """Whether each of these samples consists of what changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKeys:
    """A dictionary or set whose keys are tensors of one integer."""

    attribute: str
    """Where it is stored, as in "Clips._features"."""

    keys: int
    """How many such keys were looked at."""

    numbers: int
    """How many different numbers they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelNumbers:
    """Names that a training dataset and one that evaluates both number, and number differently."""

    attribute: str
    """Where the numbers are, as in "RugFolder.class_to_idx"."""

    loader: str
    """The evaluation's loader."""

    trained: int
    """How many names the training has."""

    common: int
    """How many names both have."""

    differing: int
    """How many of them have other numbers."""

    examples: tuple[tuple[object, int, int], ...]
    """Name, its number in the training, its number in the evaluation."""

    is_named_so: bool
    """Whether the attribute's name says that these are the labels of classes, or the tokens of a vocabulary."""

    is_meant_alike: bool
    """Whether both are of one class, have most names in common, and nothing was seen that may translate the numbers."""
