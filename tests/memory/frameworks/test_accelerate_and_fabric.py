"""Loops with Accelerate's and Fabric's backward survive as loops without them do."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch
from scarcity import FailAt
from torch import nn

from penstock import BackwardStep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def needs(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 5, generator=generator) for _ in range(4)]


def model_of(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(dropout), nn.Linear(8, 1))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def accelerated(how: str, fail_at: list[int], dropout: float, micro_batch: int | None = None) -> tuple[Any, int]:
    """Train with `accumulate()` in bf16."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = model_of(dropout)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    options = {"optimizer": optimizer, "micro_batch": micro_batch}
    step = BackwardStep(model, loss_fn, backward=accelerator.backward, **options) if how == "step" else None
    mode = FailAt(fail_at)
    for batch in batches():
        with accelerator.accumulate(model):
            if step is not None:
                with mode:
                    step(batch)
            else:
                accelerator.backward(loss_fn(model, batch))
            with mode:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], mode.count


def fabricated(how: str, fail_at: list[int], dropout: float, micro_batch: int | None = None) -> tuple[Any, int]:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model: Any = model_of(dropout)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    options: Any = {"optimizer": optimizer, "micro_batch": micro_batch}
    step = BackwardStep(model, loss_fn, backward=fabric.backward, **options) if how else None
    mode = FailAt(fail_at)
    for number, batch in enumerate(batches()):
        with mode:
            if step is not None:
                step(batch)
            else:
                fabric.backward(loss_fn(model, batch))
            if number % 2:
                optimizer.step()
        if number % 2:
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], mode.count


@needs("accelerate")
def test_accumulation_with_accelerate_survives() -> None:
    torch.manual_seed(1)
    expected, _ = accelerated("", [], 0.5)
    torch.manual_seed(1)
    _, count = accelerated("step", [], 0.5)
    for number in range(1, count, count // 5):
        torch.manual_seed(1)
        assert all(map(torch.equal, accelerated("step", [number], 0.5)[0], expected)), number
    whole, _ = accelerated("", [], 0.0)
    cut, _ = accelerated("step", [], 0.0, micro_batch=4)
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(cut, whole, strict=True))  # bf16


@needs("lightning")
def test_a_loop_of_fabrics_survives() -> None:
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    torch.manual_seed(1)
    expected, _ = fabricated("", [], 0.5)
    torch.manual_seed(1)
    _, count = fabricated("step", [], 0.5)
    for number in range(1, count, count // 5):
        torch.manual_seed(1)
        assert all(map(torch.equal, fabricated("step", [number], 0.5)[0], expected)), number
    whole, _ = fabricated("", [], 0.0)
    cut, _ = fabricated("step", [], 0.0, micro_batch=4)
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(cut, whole, strict=True))  # bf16
