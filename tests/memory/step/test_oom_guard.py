"""Loops of one's own survive too, and what reaches the user is explained."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from scarcity import Capacity, FailAt
from torch import Tensor, nn

from penstock import DataLoader, OOMGuard, OptionError, OutOfMemoryError, Sim, TrainStep, ledger
from penstock.device.oom import is_out_of_memory
from penstock.memory.planning import planner


def model_of(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, width)).double()


def gone_through(guard: OOMGuard, model: nn.Module, batch: Tensor) -> int:
    """Run forward and backward by hand; return how many tries it took."""
    tries = 0
    for attempt in guard.attempts(batch):
        tries += 1
        with attempt:
            for part in attempt.parts:
                (model(part).square().sum() / len(batch)).backward()
    return tries


def always_short(guard: OOMGuard) -> None:
    for attempt in guard.attempts(torch.ones(4, 4)):
        with attempt:
            raise torch.OutOfMemoryError("no more")


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_loop_under_the_guard_has_the_same_gradients_wherever_it_failed() -> None:
    batch = torch.ones(6, 16, dtype=torch.float64)
    clean = model_of()
    with FailAt() as counting:
        assert gone_through(OOMGuard(clean), clean, batch) == 1
    for number in range(counting.count - 1):
        model = model_of()
        with FailAt([number]):
            gone_through(OOMGuard(model), model, batch)
        assert torch.equal(gradients(model), gradients(clean)), number


def test_gradients_of_earlier_batches_are_kept_after_a_failure() -> None:
    first, second = (torch.full((4, 16), value, dtype=torch.float64) for value in (1.0, 2.0))

    def accumulated(fail_at: list[int], optimizer: bool) -> tuple[Tensor, int]:
        model = model_of()
        guard = OOMGuard(model, torch.optim.SGD(model[0].parameters()) if optimizer else None)
        gone_through(guard, model, first)
        with FailAt(fail_at) as counting:
            gone_through(guard, model, second)
        return gradients(model), counting.count

    for optimizer in (False, True):
        expected, count = accumulated([], optimizer)
        for number in range(0, count, 4):
            assert torch.equal(accumulated([number], optimizer)[0], expected), number


class Recalling(nn.Module):
    """Carries a hidden state over, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden, self.calls = torch.zeros(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.layer(x) + self.hidden * self.calls
        self.hidden = found.detach().mean(0)
        return found


def test_what_a_model_remembers_is_as_before_each_try() -> None:
    def recalled(fail_at: list[int]) -> tuple[Any, int]:
        torch.manual_seed(0)
        model, batch = Recalling(), torch.arange(8.0).view(2, 4)
        with FailAt(fail_at) as counting:
            gone_through(OOMGuard(model), model, batch)
        return (model.hidden, model.calls, gradients(model)), counting.count

    expected, count = recalled([])
    for number in range(count):
        assert_same(recalled([number])[0], expected, f"{number}")


def test_an_optimizer_that_steps_inside_of_a_try_that_fails_is_an_error() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OOMGuard(model, optimizer)

    def train(failures: int) -> None:
        for attempt in guard.attempts(torch.ones(2, 4)):
            with attempt:
                model(attempt.parts[0]).sum().backward()
                optimizer.step()
                if failures:
                    raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")

    train(0)
    with pytest.raises(OutOfMemoryError, match=r"had changed (weight|bias) in place.*step belongs after the loop"):
        train(1)


def test_sizes_shrink_to_what_fits_and_are_remembered() -> None:
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))
    batch = torch.randn(32, 50, 64)
    guard, free = OOMGuard(model), OOMGuard(model)
    with Capacity() as memory:
        gone_through(free, model, batch)
    model.zero_grad()
    with Capacity(memory.peak // 3):
        first, second = (gone_through(guard, model, batch) for _ in range(2))
    assert first > 2
    assert second < first


def test_other_errors_are_raised() -> None:
    model = model_of()
    for attempt in OOMGuard(model).attempts(torch.ones(2, 16)):
        with pytest.raises(ValueError, match="bad"), attempt:
            raise ValueError("bad")


def test_a_sample_that_does_not_fit_is_explained() -> None:
    model, batch = model_of(), torch.ones(1, 16, dtype=torch.float64)
    with (
        pytest.raises(OutOfMemoryError, match=r"memory ran out: 1\.0 GiB more was needed") as caught,
        FailAt(range(1000)),
    ):
        gone_through(OOMGuard(model), model, batch)
    text = str(caught.value)
    assert "in forward of Linear" in text
    assert "test_oom_guard.py:" in text
    assert "(model(part).square().sum() / len(batch)).backward()" in text
    assert "on cpu: weights" in text
    assert is_out_of_memory(caught.value)


def test_batch_norm_is_not_cut_by_the_guard_either() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(OutOfMemoryError, match=r"BatchNorm1d \('1'\)"):
        always_short(OOMGuard(model))
    with pytest.raises(OptionError, match="at least 1"):
        OOMGuard(model, micro_batch=0)


def test_what_a_failure_kept_alive_is_free_before_the_next_try() -> None:
    alive: list[int] = []

    class Held:
        count = 0

        def __init__(self) -> None:
            Held.count += 1

        def __del__(self) -> None:
            Held.count -= 1

    def deep(level: int) -> None:
        held = Held()
        if level:
            deep(level - 1)
        else:
            try:
                raise KeyError("a context")
            except KeyError as error:
                raise torch.OutOfMemoryError("no more") from error
        del held

    gc.disable()
    try:
        for number, attempt in enumerate(OOMGuard(model_of()).attempts(torch.ones(4, 16))):
            alive.append(Held.count)
            with attempt:
                if number < 2:
                    deep(5)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_auto_begins_with_the_size_that_the_plan_predicts_to_fit() -> None:
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))
    batch = torch.randn(32, 50, 64)

    def loss_fn(module: nn.Module, part: Any) -> tuple[Tensor, int]:
        return module(part).square().sum(), len(part)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ways = planner.plan(model, loss_fn, batch, optimizer, budget="1GiB").variants
    quarter = next(variant for variant in ways if variant.parts == 4)
    step = TrainStep(model, optimizer, loss_fn, micro_batch="auto", budget=int(quarter.peak_nbytes * 1.1))
    step(batch)
    assert step.statistics().micro_batch == 8
    assert step.statistics().out_of_memory == 0


def test_the_ledger_counts_by_role_and_module() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.BatchNorm1d(256))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    kept = torch.zeros(1 << 20)
    found = ledger(model, optimizer)
    host = found.on("cpu")
    weights = 256 * 256 * 4
    assert host.weights == weights + 4 * 256 * 4 + 8
    assert host.gradients == weights + 2 * 256 * 4
    assert host.optimizer >= 2 * host.gradients
    assert host.others >= kept.nbytes
    assert found.modules["0"].weights == found.modules["0"].gradients == weights
    assert found.modules["0"].optimizer == 2 * weights + 4
    assert sum(one.weights for one in found.modules.values()) == host.weights
    assert host.allocated > host.weights + host.gradients + host.optimizer + host.others
    assert "by module" in found.render()


def test_tied_weights_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    assert ledger(model).on("cpu").weights == 64 * 64 * 4


def test_sparse_gradients_and_parameters_of_other_classes_are_in_the_ledger() -> None:
    class Marked(nn.Parameter):
        pass

    model = nn.ModuleList([nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8, bias=False)])
    model[1].weight = Marked(torch.zeros(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[1](model[0](torch.arange(5))).sum().backward()
    optimizer.step()
    found = ledger(model, optimizer)
    assert found.on("cpu").weights == 4 * (100 * 8 + 8 * 8)
    assert found.on("cpu").gradients == found.on("cpu").optimizer == 5 * (8 + 4 * 8) + 4 * 8 * 8
    assert found.modules["0"].gradients == 5 * (8 + 4 * 8)


def test_the_ledger_counts_by_role_at_the_peak_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Sequential(nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(32, 64)
    step = TrainStep(model, optimizer, lambda module, batch: (module(batch).sum(), len(batch)))
    step(x)
    found = ledger(model, optimizer, during=lambda: step(x))
    weights = sum(p.nbytes for p in model.parameters())
    assert found.at_peak["weights"] == weights
    assert 2 * weights <= found.at_peak["optimizer"] < 2 * weights + 100
    assert found.at_peak["activations"] + found.at_peak["temporaries"] >= 32 * 256 * 4
    assert "at the peak of the step" in found.render()
    assert "activations" in found.to_json()["modules"]["1"]
    assert step.statistics().steps == 2
    model[0].register_forward_hook(lambda *_: None)
    assert len(model[0]._forward_hooks) == 1, "its own hooks are gone"
    assert ledger(model).at_peak == {}


def test_activations_are_counted_by_module_at_the_peak() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 512), nn.Tanh()), nn.Linear(512, 1))
    x = torch.zeros(64, 8)
    found = ledger(model, during=lambda: model(x).sum().backward())
    assert found.modules["0"].activations == 64 * 512 * 4  # of Tanh, which the last layer saves too
    assert found.at_peak["activations"] >= 64 * 512 * 4


def test_the_loaders_slots_are_in_the_ledger() -> None:
    loader = DataLoader(torch.zeros(64, 1 << 14), batch_size=8, device=Sim())  # type: ignore[arg-type]
    for _ in loader:
        found = ledger(nn.Linear(2, 2), loader=loader)
        break
    assert found.on("cpu").loader >= 8 << 16
    assert loader.statistics().uploading_nbytes >= 0


def test_the_callers_weights_are_not_changed_by_an_explanation() -> None:
    model = model_of()
    before, batch = copy.deepcopy(model.state_dict()), torch.ones(1, 16, dtype=torch.float64)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda m, b: (m(b).sum(), len(b)))
    with pytest.raises(OutOfMemoryError), FailAt(range(2, 1000)):
        step(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
