"""What a program would save beyond its tensors: `torch.save` writes the whole storage of a view."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten_with_path

from penstock.observe.doctor.probe_results import SavedStorages
from penstock.observe.doctor.thresholds import THRESHOLDS


def measure_storages(saved: Any) -> SavedStorages | None:
    """Return how many bytes the tensors of an object have, and their storages; None where these are about the same.

    Each storage is written once, however many tensors have it. Source: "Saving and loading tensors preserves views" in
    torch's notes on serialization.

    Raises:
        Exception: from objects that cannot be pickled.
    """
    shared: dict[int, int] = {}
    used: Counter[int] = Counter()
    for tensor in _tensors_in(saved):
        storage = tensor.untyped_storage()
        shared[storage._cdata] = storage.nbytes()
        used[storage._cdata] += tensor.nbytes
    unused = {key: nbytes - used[key] for key, nbytes in shared.items() if nbytes > used[key]}
    unused_nbytes, nbytes = sum(unused.values()), sum(shared.values())
    if unused_nbytes < max(THRESHOLDS.unused_storage_nbytes, THRESHOLDS.unused_storage_fraction * nbytes):
        return None
    name = _name_of(saved, max(unused, key=lambda key: unused[key]))
    return SavedStorages(name=name, nbytes=nbytes, unused_nbytes=unused_nbytes)


def _tensors_in(saved: Any) -> list[torch.Tensor]:
    """Return the tensors that are saved, those in modules and in other objects too."""
    walk = _Walk(io.BytesIO())
    walk.dump(saved)
    return walk.tensors


class _Walk(pickle.Pickler):
    """Looks at all that is pickled, and leaves out what is large."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # that of torch.save
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, one: Any) -> int | None:
        if isinstance(one, torch.Tensor) and one.layout is torch.strided:
            self.tensors.append(one)
        return 0 if isinstance(one, torch.Tensor | np.ndarray | bytes) else None


def _name_of(saved: Any, storage: int) -> str:
    """Return where the first tensor with a storage is."""
    for path, leaf in tree_flatten_with_path(saved)[0]:
        is_tensor = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if is_tensor and leaf.untyped_storage()._cdata == storage:
            return "".join(map(str, path))
    return "an object in it"
