"""Ranks that train one model together: what they agree on, and what they add up.

Agreement happens on the host, over gloo, so that it neither waits for the GPU nor needs memory there; gradients are
added up over the model's own process group.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from penstock.core.errors import OptionError
from penstock.device.oom import is_out_of_memory

_TRIES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vote:
    """What all ranks know after a vote."""

    failed: bool
    """Whether some rank cannot go on."""

    least: float
    """The smallest of the numbers that were cast for it."""

    sums: list[float]
    """The sums of the lists that were cast, item by item."""


class _Ballot:
    """Numbers on the host, as the tensor that travels and as the array that is read without any operation."""

    def __init__(self, length: int) -> None:
        self.tensor = torch.zeros(length, dtype=torch.float64)
        self.cast: np.ndarray = self.tensor.numpy()


class Peers:
    """The ranks of one model. Every method is collective: all ranks call it, in the same order.

    Args:
        group: the model's process group.
        broadcast_buffers: whether rank 0's buffers are everybody's.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, broadcast_buffers: bool) -> None:
        self._group = group
        self.broadcast_buffers = broadcast_buffers
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        on_host = dist.get_backend(group) == "gloo"
        self._host = group if on_host else dist.new_group(_ranks(group), backend="gloo")
        self._ballots: dict[int, _Ballot] = {}

    def vote(self, *, failed: bool, least: float, numbers: Sequence[float]) -> Vote:
        """Tell all ranks, and be told by all, whether somebody failed, the least of a number, and sums."""
        sums, smallest = self._ballot(1 + len(numbers)), self._ballot(0)
        sums.cast[:] = [failed, *numbers]
        smallest.cast[:] = least
        least_of = functools.partial(dist.all_reduce, op=dist.ReduceOp.MIN)
        _finish([_begin(dist.all_reduce, sums.tensor, self._host), _begin(least_of, smallest.tensor, self._host)])
        cast = sums.cast.tolist()
        return Vote(failed=cast[0] > 0, least=float(smallest.cast[0]), sums=cast[1:])

    def _ballot(self, length: int) -> _Ballot:
        """Return room for so many numbers (for the least of them: 0), the same each time."""
        if length not in self._ballots:
            self._ballots[length] = insisted(functools.partial(_Ballot, max(1, length)))
        return self._ballots[length]

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks, in their order."""
        texts: list[str] = [""] * self.size
        dist.all_gather_object(texts, text, group=self._host)
        return texts

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        _finish([_begin(dist.all_reduce, tensor, self._group) for tensor in tensors])

    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by that of the first rank."""
        broadcast = functools.partial(dist.broadcast, src=_ranks(self._group)[0])
        _finish([_begin(broadcast, tensor, self._group) for tensor in tensors])


def peers_of(model: nn.Module) -> tuple[nn.Module, Peers | None]:
    """Return what a rank runs of `model`, and who else does; (model, None) where it is not parallel.

    Raises:
        OptionError: ranks meet inside of the model's forward or backward in a way that cannot be stepped.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise OptionError(
            "FullyShardedDataParallel (FSDP1) cannot be gone on with after an out-of-memory; shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2), or step it by hand"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return model, Peers(_shard_group(model), broadcast_buffers=False)
    if not isinstance(model, DistributedDataParallel):
        _refuse_parallel_parts(model)
        return model, None
    inner: nn.Module = model.module
    _refuse_meeting_layers(inner)
    return inner, Peers(model.process_group, broadcast_buffers=model.broadcast_buffers)


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank holds a shard of the model's parameters (FSDP2)."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's own part of a distributed tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_group(model: nn.Module) -> dist.ProcessGroup:
    _refuse_meeting_layers(model)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    whole = [name for name, param in trained.items() if not isinstance(param, DTensor)]
    if whole:
        raise OptionError(
            f"{whole[0]} is not sharded, so that its gradient would be this rank's alone; call fully_shard on the "
            "whole model too"
        )
    meshes = {param.device_mesh for param in trained.values() if isinstance(param, DTensor)}
    if len(meshes) != 1 or next(iter(meshes)).ndim != 1:
        raise OptionError(
            f"the model lies on {len(meshes)} device meshes, of {max(mesh.ndim for mesh in meshes)} dimensions at "
            "most; TrainStep steps models that are sharded over one, of one dimension (no replicas, no tensor "
            "parallelism): step this one by hand"
        )
    return next(iter(meshes)).get_group()


def _refuse_parallel_parts(model: nn.Module) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise OptionError(
            f"DistributedDataParallel is inside of a {type(model).__name__}, where its ranks meet in backward, and one "
            "rank's out-of-memory hangs the others; let it be the outermost, around the whole (or compiled) model"
        )


def _refuse_meeting_layers(model: nn.Module) -> None:
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise OptionError(
            "SyncBatchNorm asks the other ranks inside of forward, where one rank's out-of-memory hangs them; use "
            "BatchNorm, or step the model by hand"
        )


def _begin(collective: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Submit a collective. What runs out of memory here has not been submitted, so that it is submitted again."""
    return insisted(functools.partial(collective, tensor, group=group, async_op=True))


def insisted(make: Callable[[], T]) -> T:
    """Return what `make` makes, made again where memory runs out."""
    for _ in range(_TRIES - 1):
        try:
            return make()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()
    return make()


def _finish(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group)
