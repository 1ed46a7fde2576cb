"""Ray Data: a pipeline that Ray executes on its cluster, as a dataset for any DataLoader.

Ray reads and processes ahead, so the loader needs no workers (`num_workers=0`). penstock's DataLoader adds pinned
batches, and copies them to a device ahead of time. Every rank of `torch.distributed` gets a share of one execution
(`streaming_split`), so that each row goes to one rank, once an epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from penstock.core.errors import OptionError
from penstock.core.ranks import Ranks
from penstock.data.optional import need

_BLOCK_ROWS = 256
"""Rows of a batch that is fetched when rows are read one by one."""


def ray_dataset(
    ds: Any,
    *,
    batch_size: int | None = None,
    columns: Sequence[str] | None = None,
    prefetch_batches: int = 2,
    drop_last: bool = False,
    local_shuffle_buffer_size: int | None = None,
    local_shuffle_seed: int | None = None,
) -> RayDataset:
    """Return a dataset for a DataLoader, of the rows of a Ray Data dataset.

    Without `batch_size` it yields rows, dicts of a value for each column, which the loader batches and collates. With
    it, it yields batches as `iter_torch_batches` does (numbers as tensors, everything else as lists), for a loader with
    `batch_size=None`. Use it with `num_workers=0`.

    Under `torch.distributed` the ranks share out the rows of one execution; all of them have to iterate, and may get
    a different number of rows. What `ray.train.get_dataset_shard` or `streaming_split` gave is one rank's already, and
    is taken as it is.

    Args:
        ds: a `ray.data.Dataset` or `ray.data.DataIterator`.
        batch_size: rows of a batch.
        columns: those that are wanted; all by default.
        prefetch_batches: how many batches Ray fetches to this machine ahead of time.
        drop_last: leave out the last batch when it is not full; with `batch_size` only.
        local_shuffle_buffer_size: shuffle rows on this machine, in a buffer of this many rows.
        local_shuffle_seed: of that shuffle.

    Raises:
        ExtraError: ray is not installed.
        OptionError: `ds` is neither; or, when it is iterated: in a worker, or on one of several ranks that
            `torch.distributed` does not know.
    """
    data = need("ray.data", "ray")
    if not isinstance(ds, data.Dataset | data.DataIterator):
        raise OptionError(
            f"ray_dataset takes a ray.data.Dataset or a DataIterator (a shard of one), not {type(ds).__qualname__}"
        )
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"batch_size must be at least 1, or None for rows, not {batch_size}")
    if drop_last and batch_size is None:
        raise OptionError("drop_last is about batches: give batch_size, or pass drop_last=True to the DataLoader")
    options = {
        "prefetch_batches": prefetch_batches,
        "drop_last": drop_last,
        "local_shuffle_buffer_size": local_shuffle_buffer_size,
        "local_shuffle_seed": local_shuffle_seed,
    }
    return RayDataset(ds, batch_size, None if columns is None else tuple(columns), options)


class RayDataset(IterableDataset[dict[str, Any]]):
    """Rows or batches of a Ray Data dataset, an epoch each time it is iterated; see `ray_dataset`."""

    def __init__(
        self, ds: Any, batch_size: int | None, columns: tuple[str, ...] | None, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._columns = columns
        self._options = options
        self._is_whole = isinstance(ds, need("ray.data", "ray").Dataset)
        self._ds = ds.select_columns(list(columns)) if self._is_whole and columns is not None else ds
        self._share: Any = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise OptionError(
                "Ray Data makes these samples on its cluster, and worker processes cannot take part in that; use "
                "num_workers=0 (prefetch_batches= sets how many batches are fetched ahead)"
            )
        if self._share is None:
            self._share = _rank_share(self._ds) if self._is_whole else self._ds
        return self._batches() if self._batch_size is not None else self._rows()

    def _read(self, rows: int) -> Iterator[dict[str, Any]]:
        batches = self._share.iter_batches(batch_size=rows, batch_format="numpy", **self._options)
        for batch in batches:
            yield batch if self._columns is None else {name: batch[name] for name in self._columns}

    def _batches(self) -> Iterator[dict[str, Any]]:
        assert self._batch_size is not None
        for batch in self._read(self._batch_size):
            yield {name: _tensor(values) for name, values in batch.items()}

    def _rows(self) -> Iterator[dict[str, Any]]:
        for batch in self._read(_BLOCK_ROWS):
            columns = {name: _tensor(values) for name, values in batch.items()}
            for row in range(len(next(iter(columns.values()), ()))):
                yield {name: values[row] for name, values in columns.items()}


def _tensor(values: Any) -> Any:
    """Return a column's numbers as a tensor that may be written to; a list of what are no numbers of one shape."""
    if values.dtype.kind not in "biuf":
        return values.tolist()
    return torch.from_numpy(values if values.flags.writeable else np.array(values))


def _rank_share(ds: Any) -> Any:
    """Return this rank's share of one execution of `ds`. All ranks call it."""
    if not (dist.is_available() and dist.is_initialized()):
        if (size := Ranks.of(os.environ, os.getppid()).world_size) > 1:
            raise OptionError(
                f"there are {size} ranks, and torch.distributed does not know them yet; call init_process_group before "
                "iterating, or pass what ray.train.get_dataset_shard gave"
            )
        return ds.iterator()
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return ds.iterator()
    pickling = need("ray.cloudpickle", "ray")
    shares: list[Any] = [None]
    if rank == 0:
        shares = [[pickling.dumps(share) for share in ds.streaming_split(size, equal=False)]]
    dist.broadcast_object_list(shares, src=0)
    return pickling.loads(shares[0][rank])
