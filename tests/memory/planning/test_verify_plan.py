"""A plan is corrected by a measured step of its choice, which leaves no trace."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scarcity import Capacity
from torch import Tensor, nn
from zoo import GPT, per_token, tokens

from penstock import plan
from penstock.memory.planning.step_variants import Plan, StepVariant
from penstock.memory.planning.verify_plan import Gauge, verify_plan

pytestmark = [pytest.mark.long, pytest.mark.slow]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


@functools.cache
def planned() -> Plan:
    model = gpt()
    return plan(model, per_token, tokens(), torch.optim.AdamW(model.parameters()), budget="1GiB")


def counted(model: nn.Module, batch: Tensor) -> Gauge:
    """Measure on the CPU, by counting what operations make."""

    def gauge(body: Callable[[], None]) -> int:
        with Capacity() as capacity:
            capacity.hold([*model.parameters(), *model.buffers(), batch])
            held = capacity.live
            body()
        return capacity.peak - held

    return gauge


def test_a_right_prediction_is_confirmed_for_checkpointed_blocks_too() -> None:
    model = gpt()
    found = planned()
    checkpointed = next(
        variant for variant in found.variants if variant.checkpoint and not variant.offload and variant.parts == 2
    )
    for variant in (found.choice, checkpointed):
        chosen = Plan(
            budget_nbytes=1 << 30, variants=found.variants, choice=variant, relative_error=found.relative_error
        )
        corrected = verify_plan(chosen, model, per_token, tokens(), torch.chunk, counted(model, tokens()))
        assert "verified by a measured step" in corrected.verified
        for before, after in zip(found.variants, corrected.variants, strict=True):
            assert after.peak_nbytes == pytest.approx(before.peak_nbytes, rel=0.03)
            assert sum(after.by_role.values()) == after.peak_nbytes


def test_a_step_that_takes_more_than_predicted_makes_the_choice_smaller() -> None:
    model = gpt()
    whole = planned().variants[0]
    found = replace(planned(), budget_nbytes=int(1.1 * whole.peak_nbytes)).choose(planned().variants)
    assert found.choice == whole
    gauge = counted(model, tokens())
    taken: list[int] = []

    def twice(body: Callable[[], None]) -> int:
        taken.append(2 * gauge(body))
        return taken[-1]

    corrected = verify_plan(found, model, per_token, tokens(), torch.chunk, twice)
    assert corrected.choice is not None
    assert corrected.choice != whole
    assert corrected.choice.peak_nbytes < whole.peak_nbytes * 1.1
    assert "+" in corrected.verified
    of_choice = corrected.choice.backward_peak_nbytes - corrected.choice.static_nbytes
    assert of_choice == pytest.approx(taken[-1], abs=corrected.choice.micro_batch), "it was measured itself"
    assert corrected.choice.describe() in corrected.verified
    first = next(one for one in corrected.variants if one.describe() == whole.describe())
    assert first.backward_peak_nbytes - first.static_nbytes == pytest.approx(taken[0], abs=first.micro_batch)
    assert corrected.render().count("note: verified by a measured step") == 1


def test_what_was_not_predicted_grows_with_the_samples_and_what_was_not_taken_is_missing_in_proportion() -> None:
    found = planned()
    whole = found.choice
    assert whole is not None
    expected = whole.backward_peak_nbytes - whole.static_nbytes

    def corrected(taken: int) -> list[tuple[int, StepVariant, StepVariant]]:
        after = verify_plan(found, gpt(), per_token, tokens(), torch.chunk, lambda body: taken)
        pairs = zip(found.variants, after.variants, strict=True)
        return [(new.backward_peak_nbytes - old.backward_peak_nbytes, old, new) for old, new in pairs]

    workspace = 5 * expected  # more than the gradients, which no micro-batch makes larger
    for more, old, new in corrected(expected + workspace):
        assert more == workspace * old.micro_batch // whole.micro_batch
        assert new.peak_nbytes >= new.backward_peak_nbytes
    for more, old, _ in corrected(expected // 2):
        assert -more == pytest.approx((old.backward_peak_nbytes - old.static_nbytes) / 2, abs=1)


def test_a_choice_that_runs_out_of_memory_is_not_chosen() -> None:
    model = gpt()
    tried = []

    def gauge(body: Callable[[], None]) -> int:
        tried.append(body)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
        return counted(model, tokens())(body)

    found = planned()
    assert found.choice is not None
    corrected = verify_plan(found, model, per_token, tokens(), torch.chunk, gauge)
    assert corrected.choice is not None
    assert corrected.choice.backward_peak_nbytes < found.choice.backward_peak_nbytes
    assert len(tried) == 2


def test_a_plan_recommends_no_micro_batch_that_a_training_step_refuses() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = plan(model, lambda model, x: (model(x).sum(), len(x)), torch.ones(8, 4), budget="1GiB")
    assert [variant.parts for variant in found.variants if not variant.checkpoint] == [1]
    assert "smaller micro-batches are left out: BatchNorm1d ('1')" in str(found)


def test_a_measured_step_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    batch = torch.randn(8, 4)
    model(batch).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [param.grad for param in model.parameters()]

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model(x).square().sum(), len(x)

    found = plan(model, loss_fn, batch, budget="1GiB", allow_batch_dependent=True)
    assert min(variant.micro_batch for variant in found.variants) == 2, "BatchNorm refuses single samples"
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    verify_plan(found, model, loss_fn, batch, torch.chunk, counted(model, batch))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(param.grad is gradient for param, gradient in zip(model.parameters(), gradients, strict=True))


def test_a_step_that_cannot_be_measured_leaves_the_plan_unverified() -> None:
    model = gpt()

    def gauge(body: Callable[[], None]) -> int:
        raise RuntimeError("Expected all tensors to be on the same device")

    found = verify_plan(planned(), model, per_token, tokens(), torch.chunk, gauge)
    assert found.verified.startswith("not verified by a measured step: RuntimeError: Expected all tensors")
    assert found.choice is not None
