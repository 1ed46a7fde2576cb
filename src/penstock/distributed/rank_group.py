"""RankGroup: the ranks that train one model: they vote, add up gradients and broadcast buffers.

Votes run on the host, over gloo, so they neither wait for the GPU nor need its memory. Gradients are added up over the
model's own process group.
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

_MAX_TRIES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VoteResult:
    """What all ranks know after a vote."""

    failed: bool
    """Whether some rank has failed."""

    minimum: float
    """The smallest of the numbers that ranks passed as `minimum`."""

    sums: list[float]
    """The sums of the ranks' `addends`, item by item."""


class _HostBuffer:
    """Numbers on the host, as a tensor for collectives and as an array that is read without an operation of torch."""

    def __init__(self, length: int) -> None:
        self.tensor = torch.zeros(length, dtype=torch.float64)
        self.array: np.ndarray = self.tensor.numpy()


class RankGroup:
    """The ranks of one model. Every method is collective: all ranks call it, in the same order.

    Args:
        group: the model's process group.
        broadcasts_buffers: whether all ranks take rank 0's buffers.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, broadcasts_buffers: bool) -> None:
        self._group = group
        self.broadcasts_buffers = broadcasts_buffers
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        on_host = dist.get_backend(group) == "gloo"
        self._host_group = group if on_host else dist.new_group(_ranks(group), backend="gloo")
        self._host_buffers: dict[int, _HostBuffer] = {}

    def vote(self, *, failed: bool, minimum: float, addends: Sequence[float]) -> VoteResult:
        """Return, on all ranks, whether any has failed, the minimum of a number, and the sums of `addends`."""
        sums, smallest = self._host_buffer(1 + len(addends)), self._host_buffer(0)
        sums.array[:] = [failed, *addends]
        smallest.array[:] = minimum
        all_reduce_min = functools.partial(dist.all_reduce, op=dist.ReduceOp.MIN)
        _wait_all(
            [
                _submit(dist.all_reduce, sums.tensor, self._host_group),
                _submit(all_reduce_min, smallest.tensor, self._host_group),
            ]
        )
        values = sums.array.tolist()
        return VoteResult(failed=values[0] > 0, minimum=float(smallest.array[0]), sums=values[1:])

    def _host_buffer(self, length: int) -> _HostBuffer:
        """Return the buffer for `length` numbers, the same one each time; 0 stands for the one of the minimum."""
        if length not in self._host_buffers:
            self._host_buffers[length] = retry_on_oom(functools.partial(_HostBuffer, max(1, length)))
        return self._host_buffers[length]

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in their order."""
        texts: list[str] = [""] * self.size
        dist.all_gather_object(texts, text, group=self._host_group)
        return texts

    def all_reduce_sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        _wait_all([_submit(dist.all_reduce, tensor, self._group) for tensor in tensors])

    def broadcast_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by the first rank's."""
        broadcast = functools.partial(dist.broadcast, src=_ranks(self._group)[0])
        _wait_all([_submit(broadcast, tensor, self._group) for tensor in tensors])


def rank_group_of(model: nn.Module) -> tuple[nn.Module, RankGroup | None]:
    """Return the module that a rank runs, and the ranks of the model; (model, None) where it is not parallel.

    Raises:
        OptionError: ranks communicate inside the model's forward or backward in a way that TrainStep cannot recover.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise OptionError(
            "FullyShardedDataParallel (FSDP1) cannot continue after an out-of-memory; shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2), or step it by hand"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return model, RankGroup(_shard_group(model), broadcasts_buffers=False)
    _reject_distributed_tensors(model)
    if not isinstance(model, DistributedDataParallel):
        _reject_parallel_parts(model)
        return model, None
    inner: nn.Module = model.module
    _reject_meeting_layers(inner)
    _reject_communication_hooks(model)
    return inner, RankGroup(model.process_group, broadcasts_buffers=model.broadcast_buffers)


def reject_parallel(model: nn.Module) -> None:
    """Raise OptionError for a model whose forward or backward is not one process's business alone."""
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if "DataParallel" in kinds:
        raise OptionError(
            "DataParallel runs a batch on several devices by threads, and what one of them has done when another runs "
            "out of memory is not known; use one device for each process"
        )
    if "DeepSpeedEngine" in kinds:
        raise OptionError(
            "DeepSpeed keeps gradients in its own buffers, which cannot be put back after a failure; use TrainStep, "
            "with fully_shard for a model that must be sharded"
        )
    reject_ranks(model, "use TrainStep, whose ranks vote")
    rank_group_of(model)


def reject_ranks(model: nn.Module, remedy: str) -> None:
    """Raise OptionError for a model whose ranks communicate."""
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FSDPModule)):
            raise OptionError(
                f"ranks of a {type(module).__name__} communicate while it runs, and one that tries again by itself "
                f"leaves the others waiting; {remedy}"
            )
    _reject_distributed_tensors(model)


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank holds a shard of the model's parameters (FSDP2)."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's own part of a distributed tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_group(model: nn.Module) -> dist.ProcessGroup:
    _reject_meeting_layers(model)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    whole = [name for name, param in trained.items() if not isinstance(param, DTensor)]
    if whole:
        raise OptionError(
            f"{whole[0]} is not sharded, so its gradient would be this rank's alone; call fully_shard on the "
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


def _reject_parallel_parts(model: nn.Module) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise OptionError(
            f"DistributedDataParallel is inside a {type(model).__name__}, where its ranks communicate in backward, and "
            "one rank's out-of-memory hangs the others; make it the outermost module, around the whole model"
        )


def _reject_distributed_tensors(model: nn.Module) -> None:
    held = [*model.named_parameters(), *model.named_buffers()]
    name = next((name for name, tensor in held if isinstance(tensor, DTensor)), None)
    if name is not None:
        raise OptionError(
            f"{name} is a distributed tensor, as of a tensor-parallel model (parallelize_module): its ranks "
            "communicate inside forward and backward, where one rank's out-of-memory shifts the collectives of the "
            "others; shard the model with fully_shard over one mesh of one dimension instead, or step it by hand"
        )


def _reject_communication_hooks(model: DistributedDataParallel) -> None:
    hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in getattr(model, "_comm_hooks", ())]
    if hooks:
        raise OptionError(
            f"the model has a communication hook ({hooks[0]}), and TrainStep adds up gradients by itself, after "
            "backward, without it; make the model without the hook, or step it by hand"
        )


def _reject_meeting_layers(model: nn.Module) -> None:
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise OptionError(
            "SyncBatchNorm communicates with the other ranks in forward, where one rank's out-of-memory hangs them; "
            "use BatchNorm, or step the model by hand"
        )


def _submit(collective: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Submit a collective. One that runs out of memory here has not been submitted, so it can be retried."""
    return retry_on_oom(functools.partial(collective, tensor, group=group, async_op=True))


def retry_on_oom(make: Callable[[], T]) -> T:
    """Return what `make` returns, calling it again if memory runs out."""
    for _ in range(_MAX_TRIES - 1):
        try:
            return make()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()
    return make()


def _wait_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group)
