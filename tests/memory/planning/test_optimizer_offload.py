"""An optimizer's state waits on the host between steps, and steps are what they were, failures included."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from scarcity import Capacity, FailAt
from torch import Tensor, nn

from penstock import OptionError, TrainStep, plan
from penstock.memory.model_tensors import state_tensors
from penstock.memory.planning.optimizer_offload import OptimizerOffload

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "Adam": functools.partial(torch.optim.Adam, lr=0.1),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
}


class OnCpu(OptimizerOffload):
    """Takes the CPU for a device: what comes to it are other tensors than those that wait."""

    def _is_offloaded(self, param: Tensor) -> bool:
        return True


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def batch(number: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def trained(make: Callable[..., torch.optim.Optimizer], *, offload: bool) -> tuple[nn.Module, TrainStep]:
    model = net()
    optimizer = make(model.parameters())
    if offload:
        OnCpu(optimizer)
    step = TrainStep(model, optimizer, loss_fn)
    for number in range(3):
        step(batch(number))
    return model, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_bitwise_the_same_as_without_offloading(name: str) -> None:
    (one, _), (other, _) = (trained(OPTIMIZERS[name], offload=offload) for offload in (False, True))
    assert all(torch.equal(mine, its) for mine, its in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_failure_anywhere_in_a_step_does_not_change_its_result(name: str) -> None:
    expected, step = trained(OPTIMIZERS[name], offload=False)
    last = batch(3)
    step(last)
    step = trained(OPTIMIZERS[name], offload=True)[1]
    with FailAt() as counting:
        step(last)
    for at in range(counting.count):
        model, step = trained(OPTIMIZERS[name], offload=True)
        with FailAt([at]):
            step(last)
        for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, its), at


def test_between_steps_the_state_is_in_the_same_host_memory_and_a_step_has_a_device_copy() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    offload = OnCpu(optimizer)

    def moments() -> list[Tensor]:
        return [state["exp_avg"] for state in optimizer.state.values()]

    inside: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: inside.extend(moments()))
    waiting: list[list[Tensor]] = []
    for number in range(3):
        loss_fn(model, batch(number))[0].backward()
        optimizer.step()
        waiting.append(moments())
    assert all(one is other for one, other in zip(waiting[0], waiting[2], strict=True))
    assert inside
    assert not any(one is other for one in inside for other in waiting[0])
    offload.close()
    assert all(torch.equal(one, other) for one, other in zip(moments(), waiting[2], strict=True))
    assert not any(one is other for one in moments() for other in waiting[2])


def test_a_state_dict_is_the_same_as_without_offloading_and_can_be_loaded() -> None:
    (one, plain), (other, offloaded) = (trained(OPTIMIZERS["Adam"], offload=offload) for offload in (False, True))
    saved, its = plain.optimizer.state_dict(), offloaded.optimizer.state_dict()
    for index, state in saved["state"].items():
        assert all(torch.equal(value, its["state"][index][name]) for name, value in state.items())
    offloaded.optimizer.load_state_dict(copy.deepcopy(saved))
    for step in (plain, offloaded):
        step(batch(4))
    assert all(torch.equal(mine, its) for mine, its in zip(one.parameters(), other.parameters(), strict=True))


def test_a_plan_offloads_the_state_where_only_that_fits_and_apply_needs_the_optimizer() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 512))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.zeros(256, 64)
    found = plan(model, loss_fn, x, optimizer, budget="1GiB")
    with_state, without = (
        found.variants[0],
        next(variant for variant in found.variants if variant.offload_state and variant.parts == 1),
    )
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert with_state.peak_nbytes - without.peak_nbytes == state
    assert without.moved_nbytes == 2 * state
    assert without.by_role["optimizer"] == with_state.by_role["optimizer"] - state
    OnCpu(optimizer)
    for counted in (False, True):
        optimizer.zero_grad()
        with Capacity() if counted else contextlib.nullcontext() as memory:
            if memory is not None:
                memory.hold([*model.parameters(), x, *state_tensors(optimizer)])
            loss_fn(model, x)[0].backward()
            optimizer.step()
    assert memory is not None
    assert memory.peak - state == pytest.approx(without.peak_nbytes, rel=0.03), "but for what waits on the host"
    chosen = dataclasses.replace(found, choice=without)
    with pytest.raises(OptionError, match=r"call plan.apply\(model, optimizer\)"):
        chosen.apply(model)
    assert chosen.apply(model, optimizer) == 256
    assert "state offloaded" in chosen.render()
