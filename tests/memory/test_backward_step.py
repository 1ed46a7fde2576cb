"""Loops that step the optimizer themselves survive, and the parts of a batch add up to the loss that the loop had."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scarcity import FailAt
from torch import Tensor, nn

from penstock import BackwardStep, OptionError, OutOfMemoryError
from penstock.memory.backward_step import loss_in

Batch = dict[str, Tensor]
Loss = Callable[..., Any]


class Tagger(nn.Module):
    """Predicts a label for each token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 11)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.dropout(self.embedding(x)).tanh())
        return found


def batches(count: int, size: int = 6) -> list[Batch]:
    """Return sequences of which another number of labels counts in each."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        x = torch.randint(0, 11, (size, 7), generator=generator)
        labels = x.clone()
        for row, left_out in enumerate(torch.randint(0, 6, (size,), generator=generator).tolist()):
            labels[row, (1 + number % 2) : 1 + left_out] = -100
        found.append({"x": x, "labels": labels})
    return found


def losses_of(model: nn.Module, batch: Batch, reduction: str = "mean", first: int = 0) -> Tensor:
    logits = model(batch["x"])[:, : 7 - first].flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"][:, first:].flatten(), reduction=reduction)


def mean_of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return losses_of(model, batch)


def mean_of_predicted_labels(model: nn.Module, batch: Batch) -> Any:
    return SimpleNamespace(loss=losses_of(model, batch, first=1))


def mean_of_samples(model: nn.Module, batch: Batch) -> Any:
    each = losses_of(model, batch, "none").view(len(batch["x"]), -1).sum(1)
    return {"loss": each.mean(), "each": each}


def divided_sum(model: nn.Module, batch: Batch, num_items_in_batch: int = 97) -> Tensor:
    return losses_of(model, batch, "sum") / num_items_in_batch


def negatives_in_batch(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["x"]).mean(1)
    return nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))


def trained(loss_fn: Loss, data: list[Batch], fail_at: list[int], dropout: float, **options: Any) -> tuple[Any, int]:
    """Train as a loop with accumulation does; a step of two batches, and clipping."""
    model = Tagger(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guarded = options.pop("guarded", True)
    step = BackwardStep(model, loss_fn, optimizer=optimizer, **options) if guarded else None
    losses = []
    for number, batch in enumerate(data):
        with FailAt(fail_at if number == len(data) - 2 else []) as counting:
            if step is None:
                found = loss_fn(model, batch)
                loss = found["loss"] if isinstance(found, dict) else getattr(found, "loss", found)
                loss.backward()
            else:
                loss = step(batch)
        losses.append(loss.detach())
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if number == len(data) - 2:
            count = counting.count
    return (list(model.parameters()), losses), count


def largest_difference(one: Any, other: Any) -> float:
    pairs = zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


LOSSES = [mean_of_labels, mean_of_predicted_labels, mean_of_samples, divided_sum]


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_one_failure_anywhere_changes_nothing(loss_fn: Loss) -> None:
    torch.manual_seed(1)
    expected, _ = trained(loss_fn, batches(6), [], 0.3, guarded=False)
    torch.manual_seed(1)
    _, count = trained(loss_fn, batches(6), [], 0.3)
    for number in range(0, count, 7):
        torch.manual_seed(1)
        assert largest_difference(trained(loss_fn, batches(6), [number], 0.3)[0], expected) == 0, number


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_batch_that_is_cut_has_the_loss_of_the_whole_whatever_it_is_a_mean_of(loss_fn: Loss) -> None:
    expected, _ = trained(loss_fn, batches(6), [], 0.0, guarded=False)
    for micro_batch in (4, 2):
        found, _ = trained(loss_fn, batches(6), [], 0.0, micro_batch=micro_batch)
        assert largest_difference(found, expected) < 1e-12  # sums in another order


def test_memory_that_stays_short_cuts_the_batch() -> None:
    expected, whole = trained(mean_of_labels, batches(6), [], 0.0, guarded=False)
    found, count = trained(mean_of_labels, batches(6), [20, 40], 0.0)
    assert count > 5 * whole  # two attempts, a check, and the parts
    assert largest_difference(found, expected) < 1e-12


def test_rules_that_agreed_at_first_are_compared_again_where_they_differ() -> None:
    even = {"x": torch.arange(42).view(6, 7) % 11, "labels": torch.arange(42).view(6, 7) % 11}
    data = [even, even, *batches(4)]
    expected, _ = trained(mean_of_labels, data, [], 0.0, guarded=False)
    found, _ = trained(mean_of_labels, data, [], 0.0, micro_batch=2)
    assert largest_difference(found, expected) < 1e-12


def test_a_loss_that_couples_samples_is_not_cut() -> None:
    with pytest.raises(OptionError, match="would be cut into micro-batches, and 2 samples in 2 parts have other"):
        trained(negatives_in_batch, batches(6), [], 0.0, micro_batch=2)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_how_a_loss_of_which_two_samples_do_not_fit_was_reduced_is_read_from_its_graph(loss_fn: Loss) -> None:
    class Narrow(Tagger):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                raise torch.OutOfMemoryError("no room for two samples")
            return super().forward(x)

    (batch,) = batches(1, size=4)
    model = Narrow()
    with pytest.warns(UserWarning, match="could not be compared: not even two samples fit"):
        BackwardStep(model, loss_fn)(batch)
    whole = Tagger()
    loss_in(loss_fn(whole, batch)).backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_weight_that_the_graph_of_a_loss_contradicts_is_refused() -> None:
    def narrow(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch["x"]) > 1:
            raise torch.OutOfMemoryError("no room for two samples")
        return divided_sum(model, batch)

    step = BackwardStep(Tagger(), narrow, weight=lambda part: (part["labels"] != -100).sum())
    with (
        pytest.warns(UserWarning, match="could not be compared"),
        pytest.raises(
            OutOfMemoryError, match='weight= says that the loss is a mean, and it is a sum; pass weight="sum"'
        ),
    ):
        step(batches(1, size=4)[0])


def test_a_weight_that_was_said_wrongly_is_refused() -> None:
    with pytest.raises(OptionError, match="other gradients"):
        trained(mean_of_labels, batches(2), [], 0.0, micro_batch=2, weight="sum")


def test_part_without_labels_that_count_adds_nothing() -> None:
    (batch,) = batches(1)
    batch["labels"][2:4] = -100
    model, whole = Tagger(), Tagger()
    BackwardStep(model, mean_of_labels, micro_batch=2)(batch)
    mean_of_labels(whole, batch).backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_check_leaves_gradients_and_random_numbers_as_they_were() -> None:
    model = Tagger(dropout=0.5)
    first, second = batches(2)
    mean_of_labels(model, first).backward()
    before = [copy.deepcopy(p.grad) for p in model.parameters()]
    torch.manual_seed(3)
    with pytest.raises(OptionError):
        BackwardStep(model, negatives_in_batch, micro_batch=2)(second)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(3).get_state())
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before, strict=True))


def test_a_loop_of_torchtitans_shape_divides_by_the_tokens_of_all_its_batches() -> None:
    def train(guarded: bool, fail_at: tuple[int, ...] = (), micro_batch: int | None = None) -> list[Tensor]:
        model = Tagger()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = BackwardStep(model, divided_sum, optimizer=optimizer, micro_batch=micro_batch) if guarded else None
        mode = FailAt(fail_at)
        data = iter(batches(6))
        for _ in range(3):  # train_step
            optimizer.zero_grad()
            window = [next(data), next(data)]
            global_valid_tokens = sum(int((one["labels"] != -100).sum()) for one in window)
            with mode:
                for batch in window:  # forward_backward_step
                    if step is not None:
                        step(batch, num_items_in_batch=global_valid_tokens)
                    else:
                        divided_sum(model, batch, global_valid_tokens).backward()
                optimizer.step()
        return [param.detach() for param in model.parameters()]

    expected = train(guarded=False)
    for number in (15, 61, 101, 170, 250):  # in forward, in backward, in the optimizer's first step, ...
        assert all(map(torch.equal, train(guarded=True, fail_at=(number,)), expected)), number
    assert all(map(torch.allclose, train(guarded=True, micro_batch=2), expected))


def test_what_cannot_be_made_right_is_refused() -> None:
    model = Tagger()
    with pytest.raises(OptionError, match="DataParallel runs a batch on several devices"):
        BackwardStep(nn.DataParallel(model), mean_of_labels)
    with pytest.raises(OptionError, match="micro_batch must be a number of samples, at least 1"):
        BackwardStep(model, mean_of_labels, micro_batch=0)
    with pytest.raises(OptionError, match=r"a tensor, or an output with a loss, not a dict"):
        BackwardStep(model, lambda model, batch: {"logits": model(batch["x"])})(batches(1)[0])
