"""Evaluation and generation survive when memory runs out, with the outputs of the whole batch."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from scarcity import Capacity, FailAt
from torch import Tensor, nn

import penstock
from penstock import DataLoader, EvalStep, OptionError, OutOfMemoryError

BATCH = torch.arange(12 * 16, dtype=torch.float64).reshape(12, 16)


class DynamicCache:
    """Named as that of Hugging Face's models."""


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)]
    return nn.Sequential(*layers).double().eval()


class Narrow(nn.Module):
    """Takes at most so many samples at once; notes what it was given, where that was not undone."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seen = most, []
        self.linear = nn.Linear(16, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.linear(x)


def test_the_output_is_the_models_wherever_memory_runs_out() -> None:
    model = model_of()
    with torch.no_grad(), FailAt() as counting:
        whole = model(BATCH)
    for number in range(counting.count):
        with FailAt([number]):
            assert torch.equal(EvalStep(model)(BATCH), whole), number
    assert not whole.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_that_does_not_fit_is_cut_and_what_fitted_is_remembered() -> None:
    model = Narrow(4)
    step = EvalStep(model)
    with torch.no_grad():
        whole = torch.cat([model.linear(part) for part in BATCH.split(3)])
    assert torch.equal(step(BATCH), whole)
    assert model.seen == [3, 3, 3, 3]  # a failed try leaves no trace
    assert step.largest_fitting == 3
    model.seen.clear()
    assert torch.allclose(step(BATCH), whole)
    assert max(model.seen) <= 4


def test_a_failed_try_holds_no_memory_when_the_next_one_begins() -> None:
    model = model_of()
    with Capacity() as alone, torch.no_grad():
        model(BATCH[:6])
    with Capacity(alone.peak + BATCH[:1].nbytes * 4) as capacity:
        capacity.hold(model.parameters())
        capacity.nbytes += capacity.live
        output = EvalStep(model)(BATCH)
    with torch.no_grad():
        assert torch.allclose(output, model(BATCH))


def test_gradients_that_wait_for_the_optimizer_are_neither_changed_nor_copied() -> None:
    model = model_of()
    model(BATCH).sum().backward()
    before = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in before]
    with FailAt([2]):
        EvalStep(model)(BATCH)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(grad, value) for grad, value in zip(before, values, strict=True))


def test_random_states_are_put_back_before_another_try() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).double()
    torch.manual_seed(1)
    with torch.no_grad():
        whole = model(BATCH)
    torch.manual_seed(1)
    with FailAt([3]):
        assert torch.equal(EvalStep(model)(BATCH), whole)


def test_batch_norm_in_training_mode_is_not_cut_and_its_statistics_are_those_of_one_pass() -> None:
    model, other = model_of().train(), model_of().train()
    with torch.no_grad():
        other(BATCH)
    with FailAt([4]):
        EvalStep(model)(BATCH)
    assert torch.equal(model[1].running_mean, other[1].running_mean)
    narrow = nn.Sequential(nn.BatchNorm1d(16).double(), Narrow(4))
    with pytest.raises(OutOfMemoryError, match=r"not cut: BatchNorm1d"):
        EvalStep(narrow)(BATCH)
    assert EvalStep(narrow.eval())(BATCH).shape == (12, 2)


def test_a_sample_that_does_not_fit_is_explained() -> None:
    with (
        pytest.warns(UserWarning, match="could not be compared: not even two samples fit at once"),
        pytest.raises(OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"),
    ):
        EvalStep(Narrow(0))(BATCH)


def test_outputs_of_many_kinds_are_joined() -> None:
    table = torch.ones(3)

    def forward(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        return {"logits": logits, "names": batch["names"], "pair": (logits.sum(1), None), "table": table, "kind": "a"}

    batch = {"x": BATCH, "names": [str(number) for number in range(12)]}
    found = EvalStep(Narrow(5), forward)(batch)
    assert found["logits"].shape == (12, 2)
    assert found["names"] == batch["names"]
    assert found["pair"][0].shape == (12,)
    assert found["pair"][1] is None
    assert found["table"] is table
    assert found["kind"] == "a"


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda model, batch: model(batch).mean(), r"the output has the shapes \(\), \(\)"),
        (lambda model, batch: {"n": len(batch)}, r"the output\['n'\] is a int"),
        (lambda model, batch: model(batch[: len(batch) // 2]), "has the shapes"),
        (lambda model, batch: {str(float(batch[0, 0])): 1}, "other keys"),
        (lambda model, batch: iter(batch), "is a .*iterator"),
        (
            lambda model, batch: torch.ones(len(batch), int(batch[0, 0] + 1)),
            r"pad them to one length.*\[row for one in",
        ),
        (lambda model, batch: {"y": model(batch), "cache": DynamicCache()}, "batch, use_cache=False"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused_with_what_they_are(forward: Any, says: str) -> None:
    assert EvalStep(Narrow(100), forward)(BATCH) is not None
    with pytest.raises(OptionError, match=says):
        EvalStep(Narrow(100), forward, micro_batch=5)(BATCH)


def test_a_list_with_a_tensor_for_each_sample_is_joined() -> None:
    def boxes(model: Any, batch: Tensor) -> list[Tensor]:
        return [torch.full((int(row[0]) % 3, 4), float(row[0])) for row in batch]

    found = EvalStep(Narrow(100), boxes, micro_batch=5)(BATCH)
    assert [one.tolist() for one in found] == [one.tolist() for one in boxes(None, BATCH)]


def test_join_says_how_to_join() -> None:
    step = EvalStep(
        Narrow(100),
        lambda model, batch: batch.mean(),
        join=lambda means, sizes: sum(mean * size for mean, size in zip(means, sizes, strict=True)) / sum(sizes),
        micro_batch=5,
    )
    assert step(BATCH) == pytest.approx(BATCH.mean().item())


def test_inference_over_a_loader_survives_too() -> None:
    model = Narrow(4)
    outputs = [*penstock.infer(EvalStep(model), DataLoader(BATCH, batch_size=8))]
    assert [len(one) for one in outputs] == [8, 4]
    with torch.no_grad():
        assert torch.allclose(torch.cat(outputs), model.linear(BATCH))


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A mapping as Hugging Face's models return: its entries are its fields, and it cannot be updated."""

    logits: Tensor
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__({name: value for name, value in vars(self).items() if value is not None})

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no update")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_outputs_that_are_mappings_and_dataclasses_stay_what_they_are(device: str) -> None:
    def forward(model: Any, batch: Tensor) -> ModelOutput:
        return ModelOutput(logits=model(batch))

    step = EvalStep(Narrow(4), forward)
    found = step(BATCH)
    assert type(found) is ModelOutput
    assert (found.logits.shape, found.loss) == ((12, 2), None)
    assert torch.equal(found["logits"], found.logits)
    outputs = [*penstock.infer(step, DataLoader(BATCH, batch_size=6), device=device)]
    assert torch.allclose(torch.cat([one.logits for one in outputs]), found.logits)


def test_an_argument_that_there_is_not_is_an_error_that_names_the_class() -> None:
    with pytest.raises(TypeError, match="EvalStep has no argument 'microbatch'; it takes micro_batch, split"):
        EvalStep(nn.Linear(3, 2), microbatch=4)  # type: ignore[call-arg]
