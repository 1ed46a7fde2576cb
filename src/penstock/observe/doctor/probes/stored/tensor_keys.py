"""Dictionaries and sets of a dataset whose keys are tensors: each is another key, whatever number it holds.

Python finds a key by its hash, and a tensor's hash is its identity. So a cache that is asked by the tensors that a
sampler yields finds nothing that it has, and grows with every sample.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from penstock.observe.doctor.contents.stored_attributes import datasets_below, stored_values
from penstock.observe.doctor.stored_results import TensorKeys

_MOST_KEYS = 4096


def find_tensor_keys(dataset: Any) -> TensorKeys | None:
    """Return the first dictionary or set that has several integer tensors as keys.

    >>> class Clips:
    ...     known = None
    >>> clips = Clips()
    >>> clips.known = {torch.tensor(3): 1.0, torch.tensor(3): 2.0}
    >>> find_tensor_keys(clips).attribute
    'Clips.known'
    """
    for one, _ in datasets_below(dataset):
        for path, value in stored_values(one):
            if isinstance(value, dict | set):
                keys = [key for key in islice(list(value), _MOST_KEYS) if _is_number(key)]
                if len(keys) > 1:
                    numbers = len({int(key) for key in keys})
                    return TensorKeys(attribute=f"{type(one).__name__}.{path}", keys=len(keys), numbers=numbers)
    return None


def _is_number(key: Any) -> bool:
    return (
        type(key) is torch.Tensor
        and key.numel() == 1
        and key.device.type == "cpu"
        and not (key.is_floating_point() or key.is_complex())
    )
