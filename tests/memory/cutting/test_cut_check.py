"""A cut that changes gradients is found, named, and refused before it is made by itself."""

from __future__ import annotations

import copy
import random
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock import OptionError, OutOfMemoryError, TrainStep

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

COUPLED: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    "in-batch negatives": (make_net, pairs, rows()),
    "functional batch norm": (make_net, functional_norm, rows()),
    "router loss": (make_net, balanced, rows()),
    "mean": (make_net, mean_of_losses, rows()),
    "mean of tokens": (make_net, mean_times_samples, (rows(), LABELS)),
    "time first": (Recurrent, squares, TIME_FIRST),
    "mixup": (make_net, mixed_up, rows()),
    "batch norm": (lambda: make_net(nn.BatchNorm1d(6)), squares, rows()),
    "normaliser": (make_net, normalised, rows()),
    "advantages": (make_net, advantages, rows()),
    "relativistic": (make_net, relativistic, rows()),
    "class frequencies": (make_net, balanced_classes, rows()),
    "covariance": (make_net, covariance, rows()),
    "listwise": (make_net, listwise, rows()),
    "batchmean": (make_net, batchmean, rows()),
    "penalty": (make_net, penalised, rows()),
    "queue": (Queue, squares, rows()),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_samples_is_found_with_the_parameter(name: str) -> None:
    make, loss_fn, batch = COUPLED[name]
    model = make()
    found = step_of(model, loss_fn).check(batch)
    assert not found.is_same
    assert found.largest > 0.05
    assert found.parameter in dict(model.named_parameters())
    assert re.search(rf"parts have other gradients: [\d.e+-]+ relative for {re.escape(found.parameter)}", str(found))


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
    with pytest.raises(OptionError, match=r"would be cut into micro-batches, and .* have other gradients"):
        step_of(make_net(), pairs, micro_batch="auto", budget="1500")(rows(24))
    step = step_of(make_net(), squares, micro_batch="auto", budget="1500")
    step(rows(24))
    assert (step.statistics().micro_batch or 24) < 24


def failing_above(samples: int | list[int], loss_fn: Loss) -> Loss:
    def fails(model: nn.Module, x: Tensor) -> Any:
        if len(x) > (samples if isinstance(samples, int) else samples[0]):
            raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
        return loss_fn(model, x)

    return fails


@pytest.mark.parametrize("options", [{}, {"micro_batch": 3}, {"micro_batch": "auto", "budget": "1500"}])
def test_a_cut_that_changes_gradients_is_refused_whoever_asks_for_it(options: dict[str, Any]) -> None:
    loss_fn = pairs if options else failing_above(5, pairs)
    step = step_of(model := make_net(), loss_fn, **options)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises((OptionError, OutOfMemoryError), match=r"have other gradients.*allow_batch_dependent=True"):
            step(rows(24))
    assert_same(model.state_dict(), before)
    step_of(make_net(), loss_fn, **options, allow_batch_dependent=True)(rows(24))


def test_a_refusal_at_an_out_of_memory_says_that_memory_ran_out_and_is_forgotten_with_it() -> None:
    fits = [5]
    step = step_of(make_net(), failing_above(fits, pairs))
    with pytest.raises(torch.OutOfMemoryError, match=r"memory ran out: 1\.0 GiB more.*(?s:.*)The batch was not cut: "):
        step(rows(8))
    fits[0] = 9
    step(rows(8))
    assert step.statistics().micro_batch == 8


def permuted(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x + 0.1 * x[torch.randperm(len(x))]).square().sum(), len(x)


def by_chance(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x * random.random()).square().sum(), len(x)


@pytest.mark.parametrize("loss_fn", [squares, noisy])
def test_dropout_and_noise_are_no_difference(loss_fn: Loss) -> None:
    step = step_of(make_net(), failing_above(5, loss_fn))
    step(rows(24))
    assert step.statistics().micro_batch == 3


@pytest.mark.parametrize("loss_fn", [permuted, by_chance])
def test_a_cut_that_other_random_numbers_keep_from_being_compared_is_warned_of_once(loss_fn: Loss) -> None:
    step = step_of(make_net(), loss_fn, micro_batch=3)
    with pytest.warns(UserWarning, match="could not be compared: random numbers are drawn that are others for each"):
        step(rows(24))
    step(rows(24))


@pytest.mark.parametrize("fits", [4, 3, 2])
def test_smaller_parts_are_compared_until_they_fit(fits: int) -> None:
    with pytest.raises(OutOfMemoryError, match="have other gradients"):
        step_of(make_net(), failing_above(fits, pairs))(rows(8))


def test_a_cut_that_could_not_be_compared_is_compared_again_later() -> None:
    fits = [1]
    step = step_of(make_net(), failing_above(fits, pairs))
    with pytest.warns(UserWarning, match="could not be compared: not even two samples fit at once"):
        step(rows(8))
    fits[0] = 2

    def train_on() -> None:
        for _ in range(8):
            step(rows(8))

    with pytest.raises(OutOfMemoryError, match="have other gradients"):
        train_on()


class Carries(nn.Module):
    """Carries a hidden state over, which has a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(4, 5)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.layer(x[None], self.hidden)
        self.hidden = hidden.detach()
        found: Tensor = out
        return found


FAILS_WHEN_CUT: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    "a carried state": (Carries, squares, rows(8)),
    "a fixed size": (make_net, lambda m, x: (m(x.view(8, 4)).square().sum(), 8), rows(8)),
    "a mask": (make_net, lambda m, b: ((b["mask"] @ m(b["x"])).sum(), 8), {"x": rows(8), "mask": torch.ones(8, 8)}),
    "ragged": (
        make_net,
        lambda m, b: (m(b["x"])[b["ends"] - 1].sum(), 3),
        {"x": rows(8), "ends": torch.tensor([3, 8])},
    ),
    "a graph": (make_net, lambda m, b: (m(b.x).sum(), 1), types.SimpleNamespace(x=rows(8))),
}


@pytest.mark.parametrize("name", FAILS_WHEN_CUT)
def test_a_batch_that_cannot_be_cut_is_an_out_of_memory_that_says_so_and_trains_on_later(name: str) -> None:
    make, loss_fn, batch = FAILS_WHEN_CUT[name]
    left = iter([True, True])

    def twice(model: nn.Module, batch: Any) -> Any:
        if next(left, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return loss_fn(model, batch)

    step = step_of(make(), twice)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"memory ran out: 1\.0 GiB more was needed(?s:.*)(split|batch_size)="
    ):
        step(batch)
    step(batch)
    assert step.statistics().steps == 1


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
    return (model(batch["image"]) * batch["boxes"].sum()).square().sum(), len(batch["boxes"])


def test_one_image_with_several_boxes_is_not_taken_for_several_samples() -> None:
    batch = {"boxes": torch.ones(6, 4), "image": rows(1)}
    with pytest.raises(OptionError, match=r"parts have other gradients.*batch_dims="):
        step_of(make_net(), boxes_loss, micro_batch=2)(batch)
    step = step_of(make_net(), boxes_loss, micro_batch=2, batch_dims={"image": 0, "boxes": None})
    step(batch)
    assert step.statistics().micro_batch == 1


def test_positions_of_one_row_still_go_to_every_part() -> None:
    step = step_of(make_net(), lambda m, b: (m(b["x"] + b["positions"]).sum(), len(b["x"])), micro_batch=2)
    step({"positions": rows(1), "x": rows(6)})
    assert step.statistics().micro_batch == 2
