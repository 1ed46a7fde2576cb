"""Whether a training dataset and those that evaluate give the same classes the same numbers.

Each of them may have numbered the classes of its own folder: then one that a folder lacks moves all that follow it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Subset

from penstock.observe.doctor.contents.compare_loaders import Evaluation
from penstock.observe.doctor.contents.stored_attributes import attributes_of, datasets_below, stored_values
from penstock.observe.doctor.stored_results import LabelNumbers

_MOST_NAMES = 200_000
_SHOWN = 3
_LABELS = re.compile(
    r"(^|_)(class(es)?|cls|labels?|categor(y|ies)|species|targets?|tags?|vocab(ulary)?|tokens?|stoi|itos)(_|$)"
)
_SQUASHED = re.compile(r"(class|label|word|char|token|tag|cat|categor(y|ies))(2|to_?)(idx|id|ix|ind|index|int|num)s?")
_NO_NUMBERS_OF_NAMES = re.compile(
    r"(^|_)(counts?|nums?|numbers?|freqs?|frequency|sizes?|lengths?|ranks?|offsets?|starts?|weights?|rows?|positions?|order)(_|$)"
)

Numbers = Mapping[Any, int]


def compare_label_numbers(training: DataLoader[Any], evaluations: Iterable[Evaluation]) -> LabelNumbers | None:
    """Return where names have other numbers in an evaluation; of several such attributes, the surest."""
    own = list(_numbers_of(training.dataset))
    found = [
        different
        for one in evaluations
        for dataset, path, theirs in _numbers_of(one.loader.dataset)
        if (different := _compare(one, dataset, path, theirs, own, training)) is not None
    ]
    return max(found, key=lambda one: (one.is_named_so and one.is_meant_alike, one.differing), default=None)


def _compare(
    evaluation: Evaluation,
    dataset: Any,
    path: str,
    theirs: Numbers,
    own: list[tuple[Any, str, Numbers]],
    training: DataLoader[Any],
) -> LabelNumbers | None:
    candidates = [(one, numbers) for one, name, numbers in own if name == path]
    # Two tasks may each have their own numbers: an evaluation of either is one of training data's.
    if not candidates or any(_different(numbers, theirs) == [] for _, numbers in candidates):
        return None
    trained, numbers = candidates[0]
    different, common = _different(numbers, theirs), len(numbers.keys() & theirs.keys())
    translated = _may_translate(training.dataset) or _may_translate(evaluation.loader.dataset)
    return LabelNumbers(
        attribute=f"{type(dataset).__name__}.{path}",
        loader=evaluation.name,
        trained=len(numbers),
        common=common,
        differing=len(different),
        examples=tuple((name, numbers[name], theirs[name]) for name in different[:_SHOWN]),
        is_named_so=_names_labels(path),
        is_meant_alike=type(trained) is type(dataset)
        and len(candidates) == 1
        and common >= 2
        and 2 * common >= max(len(theirs), len(numbers))  # of a model of many classes, an evaluation may pick few
        and not translated
        and type(attributes_of(dataset).get(path)) is not list,
    )


def _different(own: Numbers, theirs: Numbers) -> list[Any]:
    """Return the names that have other numbers, in the order of these."""
    return sorted((name for name in own.keys() & theirs.keys() if own[name] != theirs[name]), key=own.__getitem__)


def _numbers_of(dataset: Any) -> Iterator[tuple[Any, str, Numbers]]:
    """Yield the attributes that number names from 0 on, each with its dataset."""
    for one, _ in datasets_below(dataset):
        rows = _length(one)
        found = [(path, numbers) for path, value in stored_values(one) if (numbers := _as_numbers(path, value, rows))]
        has_mapping = any(
            isinstance(value, dict) and _as_numbers(path, value, rows) for path, value in stored_values(one)
        )
        for path, numbers in found:
            # A list beside a mapping is there to be shown.
            if not (has_mapping and isinstance(attributes_of(one).get(path), list)):
                yield one, path, numbers


def _as_numbers(path: str, value: Any, rows: int | None) -> Numbers | None:
    if _NO_NUMBERS_OF_NAMES.search(_spaced(path)):
        return None
    numbers: dict[Any, int]
    if isinstance(value, dict):
        if not 2 <= len(value) <= _MOST_NAMES or not all(map(_is_number, value.values())):
            return None
        numbers = {name: int(number) for name, number in value.items()}
    elif isinstance(value, list | tuple | np.ndarray) and _names_labels(path):
        names = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
        if not isinstance(names, list | tuple) or not 2 <= len(names) <= _MOST_NAMES:
            return None
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            return None  # numbers of classes in a list say nothing of what they become; rows repeat
        numbers = {name: number for number, name in enumerate(names)}
    else:
        return None
    if len(numbers) == rows or not all(
        isinstance(name, str) or (_is_number(name) and _names_labels(path)) for name in numbers
    ):
        return None  # places of the dataset's own rows
    return numbers if set(numbers.values()) == set(range(len(numbers))) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _names_labels(path: str) -> bool:
    """Return whether the name of an attribute says that it is about classes or tokens.

    >>> [_names_labels(name) for name in ("class_to_idx", "encoder.classes_", "word2idx", "vocab.stoi", "stations")]
    [True, True, True, True, False]
    """
    return _LABELS.search(_spaced(path)) is not None or _SQUASHED.search(path.lower()) is not None


def _spaced(path: str) -> str:
    return re.sub(r"[^a-z]+", "_", re.sub(r"([a-z])([A-Z])", r"\1_\2", path).lower())


def _may_translate(dataset: Any) -> bool:
    """Return whether something may replace the labels that a dataset returns: a target_transform, or a wrapper."""
    below = [one for one, _ in datasets_below(dataset)]
    wrappers = [one for one in below if not isinstance(one, Subset)]
    is_wrapped = any(isinstance(value, Dataset) for one in wrappers for value in attributes_of(one).values())
    return is_wrapped or any(_has_target_transform(one) for one in below)


def _has_target_transform(dataset: Any) -> bool:
    return any(
        callable(value) and re.search(r"(^|_)(targets?|labels?|y)(_|$)", _spaced(name))
        for name, value in attributes_of(dataset).items()
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None
