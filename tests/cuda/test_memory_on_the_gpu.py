"""On a real GPU: what the tests of the memory half prove with counted and failing operations."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import OutOfMemoryError, TrainStep, ledger, plan, release
from penstock.device.cuda import blas_workspace_nbytes, take_blas_workspaces

pytestmark = pytest.mark.cuda

WIDTH, LENGTH = 512, 256


def model_of(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).cuda()


def batch_of(size: int) -> Tensor:
    return torch.randn(size, LENGTH, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


@pytest.fixture
def small_card() -> Iterator[int]:
    """Leave this process 2 GiB of the card."""
    release()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
    yield 2 << 30
    torch.cuda.set_per_process_memory_fraction(1.0)
    release()


def peak_of(step: TrainStep, batch: Any) -> int:
    step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.arithmetic
def test_training_continues_in_smaller_parts_with_the_same_gradient(small_card: int) -> None:
    cut = model_of()
    whole = copy.deepcopy(cut)
    batch = batch_of(512)  # whose activations alone take 4 GiB
    step = TrainStep(cut, torch.optim.SGD(cut.parameters(), lr=0.0), loss_fn)
    loss = step(batch)
    found = step.statistics()
    assert found.out_of_memory >= 2
    assert found.micro_batch is not None
    assert found.micro_batch < 512
    by_hand = TrainStep(whole, torch.optim.SGD(whole.parameters(), lr=0.0), loss_fn, micro_batch=found.micro_batch)
    assert by_hand(batch).item() == pytest.approx(loss.item(), rel=1e-6)
    for one, other in zip(cut.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_sample_that_does_not_fit_is_explained(small_card: int) -> None:
    model = nn.Linear(8, 1 << 30, bias=False, device="meta")

    def too_large(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return torch.empty(1 << 32, device="cuda").sum(), 1

    step = TrainStep(model_of(1), torch.optim.SGD(model_of(1).parameters(), lr=0.1), too_large)
    with pytest.raises(OutOfMemoryError, match="this is exhaustion") as caught:
        step(batch_of(1))
    assert "16.0 GiB more was needed" in str(caught.value)
    assert model.weight.is_meta


def test_matrix_products_of_forward_and_of_backward_take_the_workspaces_that_plans_count() -> None:
    device = torch.device("cuda", 0)
    take_blas_workspaces(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    take_blas_workspaces(device)
    assert torch.cuda.memory_allocated() - before == pytest.approx(2 * blas_workspace_nbytes(device), abs=2 << 20)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_planned_peak_is_the_allocators_within_five_percent(parts: int) -> None:
    release()
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = batch_of(64)
    way = next(w for w in plan(model, loss_fn, batch, optimizer, modes=("plain",)).variants if w.parts == parts)
    measured = peak_of(TrainStep(model, optimizer, loss_fn, micro_batch=way.micro_batch), batch)
    assert way.peak_nbytes == pytest.approx(measured, rel=0.05)


def test_the_ledger_adds_up_to_the_allocators_numbers() -> None:
    release()
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    TrainStep(model, optimizer, loss_fn)(batch_of(4))
    account = ledger(model, optimizer).on("cuda:0")
    assert account.allocated == torch.cuda.memory_allocated()
    held = account.weights + account.gradients + account.optimizer + account.others + account.loader
    assert held + account.unseen == account.allocated
    assert account.optimizer >= 2 * account.weights * 0.99
    assert account.cached == torch.cuda.memory_reserved() - account.allocated


def test_release_gives_cached_blocks_back() -> None:
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del block
    assert release().device_cache >= 64 << 20


def test_the_ledgers_peak_is_the_allocators() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, optimizer, loss_fn)
    batch = batch_of(64)
    expected = peak_of(step, batch)
    release()
    found = ledger(model, optimizer, during=lambda: step(batch))
    assert sum(found.at_peak.values()) + batch.nbytes == pytest.approx(expected, rel=0.05)


def test_a_plan_is_verified_by_a_measured_step() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    found = plan(model, loss_fn, batch_of(64), optimizer)
    assert found.verified.startswith("verified by a measured step"), found.verified
    assert found.choice is not None
    step = TrainStep(model, optimizer, loss_fn, micro_batch=found.choice.micro_batch)
    assert found.choice.peak_nbytes == pytest.approx(peak_of(step, batch_of(64)), rel=0.05)
