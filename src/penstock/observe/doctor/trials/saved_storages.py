"""What a program would save beyond its tensors: `torch.save` writes the whole storage of a view."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from penstock.observe.doctor.probe_results import SavedStorages
from penstock.observe.doctor.thresholds import THRESHOLDS


def measure_storages(saved: Any) -> SavedStorages | None:
    """Return how many bytes the tensors of an object have, and their storages; None where these are about the same.

    Each storage is written once, however many tensors have it. Source: "Saving and loading tensors preserves views" in
    torch's notes on serialization.
    """
    shared: dict[int, int] = {}
    used: Counter[int] = Counter()
    names: dict[int, str] = {}
    for path, tensor in tree_flatten_with_path(saved)[0]:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            shared[storage._cdata] = storage.nbytes()
            used[storage._cdata] += tensor.nbytes
            names.setdefault(storage._cdata, "".join(map(str, path)))
    unused = {key: nbytes - used[key] for key, nbytes in shared.items() if nbytes > used[key]}
    unused_nbytes, nbytes = sum(unused.values()), sum(shared.values())
    if unused_nbytes < max(THRESHOLDS.unused_storage_nbytes, THRESHOLDS.unused_storage_fraction * nbytes):
        return None
    return SavedStorages(
        name=names[max(unused, key=lambda key: unused[key])], nbytes=nbytes, unused_nbytes=unused_nbytes
    )
