"""Dictionaries and sets of a dataset whose keys are tensors: each is another key, whatever number it holds.

Python finds a key by its hash, and a tensor's hash is its identity. So a cache that is asked by the tensors that a
sampler yields finds nothing that it has, and grows with every sample. Tensors may be keys for another purpose, and some
samplers yield the same ones in each epoch: so the sampler is asked for an index that is a key already, and its sample
is made once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

from penstock.observe.doctor.contents.stored_attributes import datasets_below, stored_values
from penstock.observe.doctor.stored_results import TensorKeys

_MOST_KEYS = 4096
_MOST_INDICES = 65536


def find_tensor_keys(dataset: Any, calls: Iterable[tuple[Any, Callable[[], Any]]]) -> TensorKeys | None:
    """Return the first dictionary or set that gets another key for an integer tensor that it has.

    Args:
        dataset: whose attributes are looked at.
        calls: the index of each sample that a loader draws, and what makes it.

    Raises:
        Exception: from the dataset.
    """
    for one, _ in datasets_below(dataset):
        for path, value in stored_values(one):
            if isinstance(value, dict | set):
                keys = {id(key): key for key in islice(list(value), _MOST_KEYS) if _is_number(key)}
                if len(keys) > 1 and _grows(value, keys, calls):
                    numbers = len({int(key) for key in keys.values()})
                    return TensorKeys(attribute=f"{type(one).__name__}.{path}", keys=len(keys), numbers=numbers)
    return None


def _grows(
    container: dict[Any, Any] | set[Any], keys: dict[int, Any], calls: Iterable[tuple[Any, Callable[[], Any]]]
) -> bool:
    """Return whether an index becomes another key when its sample is made, though the container has its number."""
    numbers = {int(key) for key in keys.values()}
    for index, make in islice(calls, _MOST_INDICES):
        if not _is_number(index):
            return False
        if int(index) in numbers and id(index) not in keys:
            make()
            return any(key is index for key in list(container))
    return False


def _is_number(key: Any) -> bool:
    return (
        type(key) is torch.Tensor
        and key.numel() == 1
        and key.device.type == "cpu"
        and not (key.is_floating_point() or key.is_complex())
    )
