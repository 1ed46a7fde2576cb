"""ParallelLayout: how a model is spread over ranks, done to a copy on one rank whose process group only pretends.

FSDP2 (`fully_shard`) and tensor parallelism (`parallelize_module`) are really applied, on torch's "fake" backend, whose
collectives do nothing: gathered layers, prefetching and buffers are torch's own. DistributedDataParallel does not run
on fake tensors. Its buckets are counted: together, as many bytes as the gradients, held all the time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.memory.optimizer.joined_optimizers import optimizers_of
from penstock.memory.planning.activation_checkpointing import blocks_of

Shard = Literal["fsdp2", "hsdp", "ddp"]

Parallelize = Mapping[str, Any] | Callable[[nn.Module, Any], Any]
"""A plan for `parallelize_module`, or `(model, mesh) -> None`, which may call that and `fully_shard` by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Options of `plan` for many ranks, checked."""

    ranks: int
    """All of them."""

    shard: Shard = "fsdp2"
    tensor_parallel: int = 1
    """Ranks that share each layer."""

    replicas: int = 2
    """Groups of ranks with a whole copy, for "hsdp"."""

    parallelize: Parallelize | None = None

    gradient_as_bucket_view: bool = False
    """DistributedDataParallel's."""

    def __post_init__(self) -> None:
        if self.shard not in get_args(Shard):
            raise OptionError(f"shard is one of {', '.join(get_args(Shard))}, not {self.shard!r}")
        for name in ("ranks", "tensor_parallel", "replicas"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        groups = self.tensor_parallel * (self.replicas if self.shard == "hsdp" else 1)
        if self.ranks % groups:
            raise OptionError(
                f"{self.ranks} ranks cannot be cut into tensor_parallel={self.tensor_parallel}"
                f"{f' and replicas={self.replicas}' if self.shard == 'hsdp' else ''}; make ranks a multiple of {groups}"
            )
        if self.tensor_parallel > 1 and self.parallelize is None:
            raise OptionError(
                "which layers tensor_parallel cuts, and how, cannot be known for an arbitrary model; pass "
                "parallelize=, a plan for parallelize_module or a function of (model, mesh)"
            )
        if self.tensor_parallel > 1 and self.shard == "ddp":
            raise OptionError("shard='ddp' is not planned with tensor_parallel; use shard='fsdp2' or 'hsdp'")
        if self.shard == "ddp" and self.parallelize is not None:
            raise OptionError("parallelize= is for shard='fsdp2' and 'hsdp'; with 'ddp' all ranks hold the whole model")

    def mesh_dims(self) -> dict[str, int]:
        """Return the dimensions of the device mesh by name."""
        replicas = self.replicas if self.shard == "hsdp" else 1
        dims = {"replicate": replicas} if self.shard == "hsdp" else {}
        dims["shard"] = self.ranks // replicas // self.tensor_parallel
        return {**dims, "tensor": self.tensor_parallel} if self.tensor_parallel > 1 else dims

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
            dims = self.mesh_dims()
            yield init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # results are kept by a mesh's shape, with process groups that are gone
            sys.excepthook = excepthook

    def spread(self, model: nn.Module, optimizer: Optimizer | None, mesh: Any) -> list[Tensor]:
        """Make a model what the first rank holds, and the optimizer step that; return buffers that stay.

        The first rank has the largest shards, where they differ.
        """
        if self.shard == "ddp":
            return [self._bucket_of(param) for param in model.parameters() if param.requires_grad]
        from torch.distributed.fsdp import FSDPModule, fully_shard
        from torch.distributed.tensor.parallel import parallelize_module

        before = dict(model.named_parameters(remove_duplicate=False))
        if callable(self.parallelize):
            self.parallelize(model, mesh)
        elif self.parallelize is not None:
            parallelize_module(model, mesh["tensor"], dict(self.parallelize))
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            sharding = mesh["replicate", "shard"] if self.shard == "hsdp" else mesh["shard"]
            for _, block in blocks_of(model):
                fully_shard(block, mesh=sharding)
            fully_shard(model, mesh=sharding)
        after = dict(model.named_parameters(remove_duplicate=False))
        replaced = {before[name]: param for name, param in after.items() if name in before}
        for one in optimizers_of(optimizer):
            one.state.clear()
            for group in one.param_groups:
                group["params"] = [replaced.get(param, param) for param in group["params"]]
        return []

    def _bucket_of(self, param: Tensor) -> Tensor:
        """Return the place of a parameter in a bucket; with `gradient_as_bucket_view`, its gradient goes there."""
        bucket = torch.empty_like(param, requires_grad=False)

        def move_gradient(param: Tensor) -> None:
            if param.grad is not bucket:
                param.grad = bucket

        if self.gradient_as_bucket_view:
            param.register_post_accumulate_grad_hook(move_gradient)
        return bucket
