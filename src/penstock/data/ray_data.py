"""Ray Data: a pipeline that Ray executes on its cluster, as a dataset for any DataLoader.

Ray reads and processes ahead, so the loader needs no workers (`num_workers=0`). penstock's DataLoader adds pinned
batches, and copies them to a device ahead of time. Every rank of `torch.distributed` gets a share of one execution
(`streaming_split`), so that each row goes to one rank, once an epoch.

Ray hands over blocks, and batches are cut from them here, which costs less than handing each through Ray's threads.
Like those of `iter_torch_batches`, batches are views of Ray's store, where Ray did not have to copy them: what a
program writes there changes the data of the next epoch, and of other programs. Ray says nothing of it; here torch's
counter of writes is looked at when the next batch is asked for. (Rejected: a copy-on-write mapping of the store. The
page faults of a batch that is read cost as much as copying it, and several times as much where it is written to.)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
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

_WRITTEN = (
    "a batch of ray_dataset was written to. Its memory is Ray's store, as with iter_torch_batches: what was "
    "written is in the next epoch's data, and other programs', if the dataset is materialized; pass writable=True for "
    "batches that may be written to"
)


def ray_dataset(
    ds: Any,
    *,
    batch_size: int | None = None,
    columns: Sequence[str] | None = None,
    prefetch_batches: int = 2,
    drop_last: bool = False,
    local_shuffle_buffer_size: int | None = None,
    local_shuffle_seed: int | None = None,
    writable: bool = False,
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
        prefetch_batches: how many of its blocks Ray fetches to this machine ahead of time
            (batches, with a local shuffle).
        drop_last: leave out the last batch when it is not full; with `batch_size` only.
        local_shuffle_buffer_size: shuffle rows on this machine, in a buffer of this many rows.
        local_shuffle_seed: of that shuffle.
        writable: True gives each batch memory of its own, which takes a copy, for programs that write to batches.
            By default tensors are views of Ray's store, as those of `iter_torch_batches`: to be read, or moved to a
            device.

    Warns:
        UserWarning: an operation of torch has written to a batch that is a view of Ray's store. Found when the next
            batch is asked for, and said once for each iteration.

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
        "local_shuffle_buffer_size": local_shuffle_buffer_size,
        "local_shuffle_seed": local_shuffle_seed,
    }
    chosen = None if columns is None else list(columns)
    return RayDataset(ds, batch_size, chosen, options, drop_last=drop_last, writable=writable)


class RayDataset(IterableDataset[dict[str, Any]]):
    """Rows or batches of a Ray Data dataset, an epoch each time it is iterated; see `ray_dataset`."""

    def __init__(
        self,
        ds: Any,
        batch_size: int | None,
        columns: list[str] | None,
        options: dict[str, Any],
        *,
        drop_last: bool,
        writable: bool,
    ) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._columns = columns
        self._options = options
        self._drop_last = drop_last
        self._writable = writable
        self._is_whole = isinstance(ds, need("ray.data", "ray").Dataset)
        self._ds = ds.select_columns(columns) if self._is_whole and columns is not None else ds
        self._share: Any = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise OptionError(
                "Ray Data makes these samples on its cluster, and worker processes cannot take part in that; use "
                "num_workers=0 (prefetch_batches= sets how many batches are fetched ahead)"
            )
        if self._share is None:
            self._share = _rank_share(self._ds) if self._is_whole else self._ds
        return self._rows() if self._batch_size is None else self._read(self._batch_size)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for columns in self._read(_BLOCK_ROWS):
            for row in range(len(next(iter(columns.values()), ()))):
                yield {name: values[row] for name, values in columns.items()}

    def _read(self, rows: int) -> Iterator[dict[str, Any]]:
        """Yield the columns of so many rows, and of the rest."""
        accessor = need("ray.data.block", "ray").BlockAccessor
        has_warned = False
        if self._options["local_shuffle_buffer_size"] is None:
            blocks = self._share.iter_batches(batch_size=None, batch_format="pyarrow", **self._options)
            tables = _tables_of(rows, blocks, accessor)
        else:
            tables = self._share.iter_batches(batch_size=rows, batch_format="pyarrow", **self._options)
        for table in tables:
            if self._drop_last and table.num_rows < rows:
                return
            chosen = table if self._columns is None else table.select(self._columns)
            arrays = accessor.for_block(chosen).to_batch_format("numpy")
            batch = {name: _values(array, chosen[name] if self._writable else None) for name, array in arrays.items()}
            yield {**batch}  # the program may change the dict
            if not has_warned and any(_is_written(batch[name], arrays[name], chosen[name]) for name in batch):
                has_warned = True
                warnings.warn(_WRITTEN, stacklevel=3)


def _tables_of(rows: int, blocks: Iterable[Any], accessor: Any) -> Iterator[Any]:
    """Yield Arrow tables of so many rows, views of the blocks, and a last one of what is left."""
    parts: list[Any] = []
    missing = rows
    for block in blocks:
        at = 0
        while block.num_rows - at >= missing:
            yield _joined([*parts, block.slice(at, missing)], accessor)
            at, missing = at + missing, rows
            parts.clear()
        if at < block.num_rows:
            parts.append(block.slice(at))
            missing -= block.num_rows - at
    if parts:
        yield _joined(parts, accessor)


def _joined(tables: list[Any], accessor: Any) -> Any:
    """Return one table of all; columns of tensors whose shapes differ become what Ray makes of them."""
    if len(tables) == 1:
        return tables[0]
    builder = accessor.for_block(tables[0]).builder()
    for table in tables:
        builder.add_block(table)
    return builder.build()


def _values(values: Any, column: Any) -> Any:
    """Return a column's numbers as a tensor; a list of what are no numbers of one shape.

    Args:
        values: the array that Ray makes of `column`: a view of it, or numbers that it has copied already.
        column: in Arrow; None for a view that is not to be written to.
    """
    if values.dtype.kind not in "biuf":
        return values.tolist()
    if values.flags.writeable:
        return torch.from_numpy(values)
    if column is not None and _lies_in(values, column):
        return torch.from_numpy(np.array(values))
    return torch.from_numpy(np.asarray(_Unlocked(values)))


def _is_written(tensor: Any, values: Any, column: Any) -> bool:
    """Return whether an operation of torch has written to a batch's column that is a view of Ray's store."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_inference() or not tensor._version:
        return False
    return tensor.data_ptr() == values.ctypes.data and _lies_in(values, column)


def _lies_in(values: np.ndarray, column: Any) -> bool:
    """Return whether an array is a view of a column, rather than a copy."""
    at = values.ctypes.data
    buffers = (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None)
    return any(buffer.address <= at < buffer.address + buffer.size for buffer in buffers)


class _Unlocked:
    """An array as one that may be written to: torch warns of others, also where nobody will."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.__array_interface__ = {**values.__array_interface__, "data": (values.ctypes.data, False)}


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
