"""Puts HDF5 files that `HDF5Writer` made together: chunk after chunk as they are, where they fall on a chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.array_columns import RAGGED
from penstock.data.formats.hdf5.writer import append
from penstock.data.optional import need
from penstock.data.rows import translate_errors

_BLOCK_NBYTES = 8 << 20
_BLOCK_VALUES = 4096


def concat_files(parts: Sequence[str], path: str) -> None:
    """Make one file of several that `HDF5Writer` made of samples of one schema, in their order.

    Chunks are copied packed while a part begins where a chunk does; parts of as many samples as a multiple of the rows
    of a chunk do so. What is at `path` is overwritten.

    Raises:
        SourceError: a part cannot be read, is of another schema, or the file cannot be written.
    """
    h5py = need("h5py", "hdf5")
    with translate_errors(f"{path} cannot be made of its {len(parts)} parts"), contextlib.ExitStack() as opened:
        files = [opened.enter_context(h5py.File(part, "r")) for part in parts]
        whole = opened.enter_context(h5py.File(path, "w"))
        names = [_datasets(file) for file in files]
        if any(one != names[0] for one in names):
            raise SourceError(f"{path}: the parts have different fields: {names}")
        for name in names[0]:
            _join(whole, [file[name] for file in files])


def _datasets(file: Any) -> list[str]:
    h5py = need("h5py", "hdf5")
    found: list[str] = []

    def see(name: str, one: Any) -> None:
        if isinstance(one, h5py.Dataset):
            found.append(name)

    file.visititems(see)
    return found


def _join(whole: Any, datasets: list[Any]) -> None:
    model = max(datasets, key=lambda dataset: dataset.chunks)
    name, ragged = model.name, model.parent.attrs.get(RAGGED)
    joint = whole.create_dataset_like(name, model, shape=(0, *model.shape[1:]))
    if ragged is not None:
        joint.parent.attrs[RAGGED] = ragged
    moves = ragged is not None and name.endswith("/offsets")
    moved = 0
    for dataset in datasets:
        if moves or not _is_packed_alike(dataset, joint):
            _copy_rows(dataset, joint, moved)
        else:
            _copy_chunks(dataset, joint)
        moved += dataset.parent["values"].shape[0] if moves else 0


def _is_packed_alike(dataset: Any, joint: Any) -> bool:
    """Whether the chunks of one may become chunks of the other; references to a heap may not."""
    parts = [(one.chunks, one.dtype, one.compression, one.shuffle) for one in (dataset, joint)]
    return parts[0] == parts[1] and joint.shape[0] % joint.chunks[0] == 0 and not dataset.dtype.hasobject


def _copy_chunks(dataset: Any, joint: Any) -> None:
    start = joint.shape[0]
    joint.resize(start + dataset.shape[0], axis=0)
    places: list[tuple[int, ...]] = []
    dataset.id.chunk_iter(lambda chunk: places.append(chunk.chunk_offset))
    for place in places:
        skipped, data = dataset.id.read_direct_chunk(place)
        joint.id.write_direct_chunk((start + place[0], *place[1:]), data, skipped)


def _copy_rows(dataset: Any, joint: Any, moved: int) -> None:
    row_nbytes = max(1, int(np.prod(dataset.shape[1:])) * dataset.dtype.itemsize)
    rows = _BLOCK_VALUES if dataset.dtype.hasobject else max(1, _BLOCK_NBYTES // row_nbytes)
    for start in range(0, dataset.shape[0], rows):
        block = dataset[start : start + rows]
        append(joint, block + moved if moved else block)
