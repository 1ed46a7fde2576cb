"""ParallelLayout: how a model is spread over ranks, done to a copy on one rank whose process group only pretends.

FSDP2 (`fully_shard`) is really applied, on torch's "fake" backend, whose collectives do nothing: gathered layers,
prefetching and buffers are torch's own. DistributedDataParallel does not run on fake tensors. Its buckets are counted:
together, as many bytes as the gradients, held all the time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.memory.optimizer.joined_optimizers import optimizers_of
from penstock.memory.planning.activation_checkpointing import blocks_of

Shard = Literal["fsdp2", "ddp"] | Callable[[nn.Module, Any], object]
"""A name, or `(model, mesh) -> None`, which calls `fully_shard` by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Options of `plan` for many ranks, checked."""

    ranks: int
    shard: Shard = "fsdp2"

    def __post_init__(self) -> None:
        if self.shard not in ("fsdp2", "ddp") and not callable(self.shard):
            raise OptionError(f"shard is 'fsdp2', 'ddp' or a function of (model, mesh), not {self.shard!r}")
        if self.ranks < 1:
            raise OptionError(f"ranks must be at least 1, not {self.ranks}")

    @contextlib.contextmanager
    def pretended(self) -> Iterator[Any]:
        """Yield a device mesh of this size, on the CPU, of which this process is the first rank.

        Raises:
            OptionError: the process has a process group of its own.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        if dist.is_initialized():
            raise OptionError(
                "plan(ranks=) pretends to be a rank, and this process is one already; plan before init_process_group, "
                "or with the command `penstock plan`"
            )
        excepthook = sys.excepthook  # which torch replaces, to put the rank before each line
        _clear_sharding_prop_cache()
        dist.init_process_group("fake", rank=0, world_size=self.ranks)
        try:
            yield init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("shard",))
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # results are kept by a mesh's shape, with process groups that are gone
            sys.excepthook = excepthook

    def spread(self, model: nn.Module, optimizer: Optimizer | None, mesh: Any) -> list[Tensor]:
        """Make a model what the first rank holds, and the optimizer step that; return buffers that stay.

        The first rank has the largest shards, where they differ.
        """
        if self.shard == "ddp":
            return [torch.empty_like(param, requires_grad=False) for param in model.parameters() if param.requires_grad]
        from torch.distributed.fsdp import fully_shard

        before = dict(model.named_parameters(remove_duplicate=False))
        if callable(self.shard):
            self.shard(model, mesh)
        else:
            for _, block in blocks_of(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        after = dict(model.named_parameters(remove_duplicate=False))
        replaced = {before[name]: param for name, param in after.items() if name in before}
        for one in optimizers_of(optimizer):
            one.state.clear()
            for group in one.param_groups:
                group["params"] = [replaced.get(param, param) for param in group["params"]]
        return []
