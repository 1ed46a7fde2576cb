"""A cut that changes gradients is found, named, and refused before it is made by itself."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock import OOMGuard, OptionError, OutOfMemoryError, TrainStep

Loss = Callable[[nn.Module, Any], tuple[Tensor, Any]]


def make_net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 5))


def step_of(model: nn.Module, loss_fn: Loss, **options: Any) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)


def rows(size: int = 7, seed: int = 1) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def tokens(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), (y != -100).sum()


def noisy(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    out = F.dropout(model(x + torch.randn_like(x)), 0.3)
    return out.square().sum(), len(x)


LABELS = torch.tensor([0, -100, -100, 3, -100, 1, 2])
SEPARATE: dict[str, tuple[nn.Module, Loss, Any]] = {
    "sum of squares": (make_net(), squares, rows()),
    "ragged tokens": (make_net(), tokens, (rows(), LABELS)),
    "noise and dropout": (make_net(), noisy, rows()),
    "group norm": (make_net(nn.GroupNorm(2, 6)), squares, rows()),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_a_loss_of_separate_samples_is_the_same_when_it_is_cut(name: str) -> None:
    model, loss_fn, batch = SEPARATE[name]
    found = step_of(model, loss_fn).check(batch)
    assert found.is_same, found
    assert found.cause == ""
    assert found.parts == 2
    assert "7 samples in 2 parts have the gradients of the whole batch" in str(found)


def pairs(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    out = F.normalize(model(x), dim=1)
    return F.cross_entropy(out @ (out.detach() + 0.1).T, torch.arange(len(x)), reduction="sum"), len(x)


def functional_norm(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return F.batch_norm(model(x), None, None, training=True).pow(3).sum(), len(x)


def balanced(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    chances = model(x).softmax(1)
    return chances[:, 0].sum() + len(x) * chances.mean(0).square().sum(), len(x)


def mean_of_losses(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return F.mse_loss(model(x), torch.ones(len(x), 5)), len(x)


def mean_times_samples(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y) * len(x), len(x)


def mixed_up(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(0.7 * x + 0.3 * x.flip(0)).pow(4).sum(), len(x)


def normalised(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    out = model(x).square().sum(1)
    return (out * out.exp()).sum() / out.exp().sum() * len(x), len(x)


def advantages(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    out = model(x)[:, 0]
    return ((out - out.mean()) / (out.std() + 1)).pow(4).sum(), len(x)


def covariance(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    out = model(x)
    return (out.T @ out).square().sum(), len(x)


def listwise(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return -model(x)[:, 0].log_softmax(0)[:3].sum(), len(x)


def relativistic(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    out = model(x)
    return F.softplus(9 * (out[:, 0] - out[:, 1].mean())).sum(), len(x)


def balanced_classes(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    labels = (x[:, 0] > 0.5).long()
    often = torch.bincount(labels, minlength=5)
    return F.cross_entropy(model(x), labels, weight=1 / (1 + often), reduction="sum"), len(x)


def batchmean(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return F.kl_div(model(x).log_softmax(1), torch.full((len(x), 5), 0.2), reduction="batchmean"), len(x)


def penalised(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum() + 3 * sum(p.square().sum() for p in model.parameters()), len(x)


class Queue(nn.Module):
    """Compares each batch with those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("queue", torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        scores = out @ self.queue.T
        self.queue = torch.cat([out.detach(), self.queue])[:3]
        return scores


class Recurrent(nn.Module):
    """Takes (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]
        return found


TIME_FIRST = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2))

COUPLED: dict[str, tuple[Callable[[], nn.Module], Loss, Any, str]] = {
    "in-batch negatives": (make_net, pairs, rows(), r"every sample meets every other \(7 x 7\).*out @ \("),
    "functional batch norm": (make_net, functional_norm, rows(), r"batch norm computes.*F\.batch_norm\(model"),
    "router loss": (make_net, balanced, rows(), r"a mean, a count or the like over all samples.*chances\.mean\(0\)"),
    "mean": (make_net, mean_of_losses, rows(), r"loss_fn returns a mean, at .*F\.mse_loss"),
    "mean of tokens": (
        make_net,
        mean_times_samples,
        (rows(), LABELS),
        r"loss_fn returns a mean, at .*F\.cross_entropy",
    ),
    "time first": (Recurrent, squares, TIME_FIRST, r"GRU \('layer'\) takes \(time, batch.*pass batch_dims=1"),
    "mixup": (make_net, mixed_up, rows(), r"samples are taken out of their places.*x\.flip\(0\)"),
    "batch norm": (lambda: make_net(nn.BatchNorm1d(6)), squares, rows(), "batch norm computes statistics"),
    "normaliser": (make_net, normalised, rows(), r"is divided by another one.*out\.exp\(\)\.sum\(\)"),
    "advantages": (make_net, advantages, rows(), r"a number computed from all samples.*out\.mean\(\)"),
    "relativistic": (make_net, relativistic, rows(), r"a number computed from all samples.*out\[:, 1\]\.mean\(\)"),
    "class frequencies": (make_net, balanced_classes, rows(), r"a count or the like over all samples.*often"),
    "covariance": (make_net, covariance, rows(), r"a mean, a count or the like over all samples.*out\.T @ out"),
    "listwise": (make_net, listwise, rows(), r"a mean, a count or the like over all samples.*log_softmax\(0\)"),
    "batchmean": (make_net, batchmean, rows(), r"loss_fn returns a mean, at .*F\.kl_div"),
    "penalty": (make_net, penalised, rows(), r"a penalty on weights is added once for each part.*p\.square"),
    "queue": (Queue, squares, rows(), "forward changes the buffer queue, which later parts read"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_samples_is_found_with_its_cause(name: str) -> None:
    make, loss_fn, batch, words = COUPLED[name]
    model = make()
    found = step_of(model, loss_fn).check(batch)
    assert not found.is_same
    assert found.largest > 0.05
    assert found.parameter in dict(model.named_parameters())
    assert re.search(words, str(found)), str(found)


def test_the_dimension_that_is_said_is_cut() -> None:
    assert step_of(Recurrent(), lambda m, x: (m(x).sum(), x.shape[1]), batch_dims=1).check(TIME_FIRST).is_same


def test_a_check_changes_nothing() -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 5)
    model = make_net(nn.BatchNorm1d(6))
    step = step_of(
        model,
        lambda m, x: (head(m(x)).square().sum(), len(x)),
        allow_batch_dependent=["BatchNorm1d"],
        accumulate=2,
    )
    step(rows())

    def state() -> Any:
        grads = [p.grad for p in (*model.parameters(), *head.parameters())]
        return copy.deepcopy((model.state_dict(), grads, torch.get_rng_state()))

    before = state()
    assert not step.check(rows(5, seed=3)).is_same
    assert_same(state(), before)


def test_running_statistics_that_depend_on_the_cut_are_found_and_not_cut() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True), nn.Conv1d(4, 1, 1))
    batch = torch.randn(5, 4, 8)
    found = step_of(model, squares).check(batch)
    assert found.buffers == ("1.running_mean", "1.running_var")
    assert "leave other values in 1.running_mean" in str(found)
    with pytest.raises(OptionError, match=r"InstanceNorm1d \('1'\)"):
        step_of(model, squares, micro_batch=2)(batch)


def test_the_first_cut_of_an_automatic_size_is_checked() -> None:
    with pytest.raises(OptionError, match=r"would be cut into micro-batches, and .* every sample meets every other"):
        step_of(make_net(), pairs, micro_batch="auto", budget="1500")(rows(24))
    step = step_of(make_net(), squares, micro_batch="auto", budget="1500")
    step(rows(24))
    assert (step.statistics().micro_batch or 24) < 24


def failing_above(samples: int, loss_fn: Loss) -> Loss:
    def fails(model: nn.Module, x: Tensor) -> Any:
        if len(x) > samples:
            raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
        return loss_fn(model, x)

    return fails


def test_the_first_cut_that_memory_asks_for_is_warned_of_once_where_it_changes_gradients() -> None:
    step = step_of(make_net(), failing_above(5, pairs))
    with pytest.warns(UserWarning, match=r"memory ran out, so batches are cut .* every sample meets every other"):
        step(rows(8))
    step(rows(9))
    assert step.statistics().micro_batch == 5


def permuted(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x + 0.1 * x[torch.randperm(len(x))]).square().sum(), len(x)


def by_chance(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x * random.random()).square().sum(), len(x)


@pytest.mark.parametrize("loss_fn", [squares, noisy, permuted, by_chance])
def test_parts_with_other_random_numbers_are_no_alarm(loss_fn: Loss) -> None:
    for options in ({}, {"micro_batch": "auto", "budget": "1500"}):
        step = step_of(make_net(), failing_above(5, loss_fn) if not options else loss_fn, **options)
        step(rows(24))
        assert (step.statistics().micro_batch or 24) < 24


def test_a_batch_that_cannot_be_checked_is_refused_with_the_reason() -> None:
    step = step_of(make_net(), squares)
    with pytest.raises(OptionError, match="a batch of 1 samples cannot be cut"):
        step.check(rows(1))

    def short(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")

    with pytest.raises(OutOfMemoryError, match="memory ran out"):
        step_of(make_net(), short).check(rows())


# ── one row ─────────────────────────────────────────────────────────────────────────────────────────────────────


def boxes_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["image"]) * batch["boxes"].sum()).sum(), len(batch["boxes"])


def test_one_image_with_several_boxes_is_not_taken_for_several_samples() -> None:
    batch = {"boxes": torch.ones(6, 4), "image": rows(1)}
    with pytest.raises(
        OptionError, match=r"some of its tensors have 6 rows, others one, and the model's input has one"
    ):
        step_of(make_net(), boxes_loss, micro_batch=2)(batch)
    with pytest.raises(OptionError, match=r"and it is not known which of them the model takes.*pass batch_dims="):
        step_of(make_net(), lambda m, b: (m[0](b["image"]).sum(), 6), micro_batch=2)(batch)  # type: ignore[index]
    step = step_of(make_net(), boxes_loss, micro_batch=2, batch_dims={"image": 0, "boxes": None})
    step(batch)
    assert step.statistics().micro_batch == 1


def test_a_guard_cuts_no_batch_whose_samples_cannot_be_told() -> None:
    model = make_net()
    with pytest.raises(OutOfMemoryError, match=r"was not cut: some of its tensors have 6 rows, others one"):
        parts_of_three_attempts(OOMGuard(model), {"boxes": torch.ones(6, 4), "image": rows(1)})
    parts = parts_of_three_attempts(OOMGuard(model, batch_dims={"x": 1}), {"x": torch.ones(2, 6)})
    assert [part["x"].shape for part in parts] == [(2, 3), (2, 3)]


def parts_of_three_attempts(guard: OOMGuard, batch: Any) -> Any:
    """Fail twice; return the parts of the third attempt."""
    failures = 0
    for attempt in guard.attempts(batch):
        with attempt:
            if failures == 2:
                return attempt.parts
            failures += 1
            raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
    return None


def test_positions_of_one_row_still_go_to_every_part() -> None:
    step = step_of(make_net(), lambda m, b: (m(b["x"] + b["positions"]).sum(), len(b["x"])), micro_batch=2)
    step({"positions": rows(1), "x": rows(6)})
    assert step.statistics().micro_batch == 2


def test_a_loss_that_fails_on_a_part_only_says_so() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        groups = model(x).view(-1, 6)
        return (groups - groups.mean(1, keepdim=True)).square().sum(), len(x)

    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn)
    with pytest.raises(RuntimeError, match="invalid for input of size") as raised:
        step.check(torch.randn(12, 3))
    assert "the whole batch of 12 samples runs, and one of its" in raised.value.__notes__[0]
