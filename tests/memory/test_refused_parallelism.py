"""Parallel models that cannot be stepped with the same gradients after a failure are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock import BackwardStep, EvalStep, OptionError, TrainStep
from penstock.distributed import rank_group


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group whose collectives do nothing, so that no socket is left."""
    monkeypatch.setattr(rank_group, "RankGroup", lambda group, **options: None)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


def step_of(model: nn.Module) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)


def test_a_tensor_parallel_model_is_refused(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, {"1": ColwiseParallel()})
    with pytest.raises(OptionError, match=r"1\.weight is a distributed tensor, as of a tensor-parallel model"):
        step_of(model)


def test_a_communication_hook_is_refused_and_not_ignored(one_rank: None) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    step_of(model)
    model.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(
        OptionError, match=r"communication hook \(fp16_compress_hook\), and TrainStep adds up gradients"
    ):
        step_of(model)


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "wrapped", "FSDP", "tensor-parallel"])
def test_what_tries_again_on_one_rank_alone_refuses_models_whose_ranks_communicate(one_rank: None, kind: str) -> None:
    mesh, model = init_device_mesh("cpu", (1,)), nn.Sequential(nn.Linear(4, 4))
    if kind == "FSDP":
        fully_shard(model, mesh=mesh)
    elif kind == "tensor-parallel":
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    else:
        model = DistributedDataParallel(model)
        model = nn.Sequential(model) if kind == "wrapped" else model  # as Fabric does
    reason = kind if kind in ("FSDP", "tensor-parallel") else "ranks of a DistributedDataParallel communicate"
    for refused in (EvalStep, lambda model: BackwardStep(model, loss_fn)):
        with pytest.raises(OptionError, match=reason):
            refused(model)
