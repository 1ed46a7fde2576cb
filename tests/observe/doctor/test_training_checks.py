"""Steps that train something else than was meant are named; those that only look like it are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import StepCalls
from penstock.observe.doctor.trial import AS_IS, TimingWindow, Trial

_NAMES = {
    "gradients-not-cleared",
    "left-out-of-optimizer",
    "trains-in-evaluation-mode",
    "loss-of-probabilities",
    "loss-of-all-pairs",
}

Step = Callable[[torch.Tensor, torch.Tensor], object]


class Loop:
    """A model with what most loops have."""

    def __init__(self, *layers: nn.Module, outputs: int = 3, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, outputs))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def update(self, loss: torch.Tensor, *, clear: bool = True) -> None:
        """Do one step."""
        if clear:
            self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def _observed(step: Step, *, classes: bool = True, steps: int = 3) -> StepCalls:
    recorder = StepCallRecorder()
    for _ in range(steps):
        batch = torch.randn(8, 4), torch.randint(3, (8,)) if classes else torch.randn(8)
        recorder.enter(batch)
        step(*batch)
        recorder.leave()
    return recorder.result()


def _found(calls: StepCalls, *, certain: bool = True) -> set[str]:
    window = TimingWindow(batches=64, wall_s=1.0, wait_s=0.0, step_s=1.0)
    measured = Measurements(
        name="train.py",
        machine=Machine(),
        settings=Settings(dataset="D"),
        has_step=True,
        trials=(Trial(name=AS_IS, windows=(window,)),),
        step_calls=calls,
    )
    return {one.name for one in diagnose(measured).findings if one.is_uncertain is not certain} & _NAMES


def test_gradients_that_nothing_clears_are_named() -> None:
    loop = Loop()
    calls = _observed(lambda x, y: loop.update(functional.cross_entropy(loop.model(x), y), clear=False))
    assert _found(calls) == {"gradients-not-cleared"}
    assert "loss.backward()" in calls.kept_gradients[0].line


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_at_any_place_are_not_named(to_none: bool) -> None:
    loop = Loop()

    def after(x: torch.Tensor, y: torch.Tensor) -> None:
        functional.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.step()
        loop.model.zero_grad(set_to_none=to_none)

    def by_hand(x: torch.Tensor, y: torch.Tensor) -> None:
        for weight in loop.model.parameters():
            weight.grad = None if to_none or weight.grad is None else torch.zeros_like(weight)
        functional.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.step()

    assert not _found(_observed(after))
    assert not _found(_observed(by_hand))


def test_gradients_that_are_accumulated_over_several_batches_are_not_named() -> None:
    loop, count = Loop(), [0]

    def accumulated(x: torch.Tensor, y: torch.Tensor) -> None:
        functional.cross_entropy(loop.model(x), y).backward()
        count[0] += 1
        if count[0] % 3 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    assert not _found(_observed(accumulated, steps=9))


def test_two_models_that_are_trained_in_turns_clear_their_own_gradients() -> None:
    makes, judges = Loop(outputs=4), Loop(outputs=1)

    def adversarial(x: torch.Tensor, y: torch.Tensor) -> None:
        made = makes.model(torch.randn_like(x))
        judges.update(judges.model(x).mean() - judges.model(made.detach()).mean())
        makes.update(judges.model(made).mean())  # judges get gradients, too, which they clear before their own

    def never_cleared(x: torch.Tensor, y: torch.Tensor) -> None:
        made = makes.model(torch.randn_like(x))
        judges.update(judges.model(x).mean() - judges.model(made.detach()).mean())
        makes.update(judges.model(made).mean(), clear=False)

    assert not _found(_observed(adversarial))
    assert _found(_observed(never_cleared)) == {"gradients-not-cleared"}


def test_closures_of_lbfgs_clear_their_gradients() -> None:
    loop = Loop()
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=4)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(loop.model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    assert not _found(_observed(step))


@pytest.mark.parametrize(
    ("layer", "certain"), [(nn.Dropout(0.5), True), (nn.BatchNorm1d(8), False), (nn.Dropout(0.0), None)]
)
def test_a_model_that_is_trained_in_evaluation_mode_is_named_unless_its_layers_are_the_same_in_both(
    layer: nn.Module, certain: bool | None
) -> None:
    loop = Loop(layer)
    loop.model.eval()
    calls = _observed(lambda x, y: loop.update(functional.cross_entropy(loop.model(x), y)))
    assert ("trains-in-evaluation-mode" in _found(calls)) is (certain is True)
    assert ("trains-in-evaluation-mode" in _found(calls, certain=False)) is (certain is False)


def test_evaluation_within_a_step_and_frozen_parts_are_no_training_in_evaluation_mode() -> None:
    student, teacher = Loop(nn.Dropout(0.5)), Loop(nn.Dropout(0.5))
    teacher.model.eval()

    def distilled(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.no_grad():
            aim = teacher.model(x).softmax(1)
        student.update(functional.cross_entropy(student.model(x), aim))

    assert not _found(_observed(distilled))
    assert not _found(_observed(distilled), certain=False)
    mixed = Loop(nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.1))
    mixed.model[1].eval()
    assert not _found(_observed(lambda x, y: mixed.update(functional.cross_entropy(mixed.model(x), y))))


def test_probabilities_in_place_of_logits_are_named_with_the_loss_that_gets_them() -> None:
    loop, one = Loop(), Loop(outputs=1)

    def entropy(x: torch.Tensor, y: torch.Tensor) -> None:
        loop.update(nn.CrossEntropyLoss()(loop.model(x).softmax(dim=-1), y))

    def binary(x: torch.Tensor, y: torch.Tensor) -> None:
        chances = torch.sigmoid(one.model(x)).squeeze(1)
        one.update(functional.binary_cross_entropy_with_logits(chances, (y > 0).float()))

    def likelihood(x: torch.Tensor, y: torch.Tensor) -> None:
        loop.update(functional.nll_loss(loop.model(x).softmax(1), y))

    for step in (entropy, binary, likelihood):
        assert _found(_observed(step)) == {"loss-of-probabilities"}


def test_logits_logarithms_and_probabilities_that_are_labels_are_right_for_their_losses() -> None:
    loop, one = Loop(), Loop(outputs=1)

    def entropy(x: torch.Tensor, y: torch.Tensor) -> None:
        logits = loop.model(x)
        aim = functional.one_hot(y, 3).float().softmax(1)
        loop.update(functional.cross_entropy(logits, aim) + functional.nll_loss(logits.log_softmax(1), y))

    def binary(x: torch.Tensor, y: torch.Tensor) -> None:
        logits = one.model(x).squeeze(1)
        loss = functional.binary_cross_entropy(torch.sigmoid(logits), (y > 0).float())
        one.update(loss + functional.binary_cross_entropy_with_logits(logits, (y > 0).float()))

    assert not _found(_observed(entropy))
    assert not _found(_observed(binary))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_losses_of_predictions_and_labels_of_other_shapes_are_named() -> None:
    loop = Loop(outputs=1)
    by_torch = _observed(lambda x, y: loop.update(functional.mse_loss(loop.model(x), y)), classes=False)
    by_hand = _observed(lambda x, y: loop.update((loop.model(x) - y).square().mean()), classes=False)
    cast = _observed(lambda x, y: loop.update((y.float() - loop.model(x)).abs().mean()))
    assert _found(by_torch) == _found(by_hand) == _found(cast) == {"loss-of-all-pairs"}
    assert by_hand.broadcast_losses[0].what == "[8, 1] and [8]"


def test_losses_of_one_shape_means_and_pairs_of_predictions_are_not_named() -> None:
    loop = Loop(outputs=1)

    def right(x: torch.Tensor, y: torch.Tensor) -> None:
        predicted = loop.model(x).squeeze(1)
        ranks = (predicted[:, None] - predicted[None]).relu().mean()
        loop.update((predicted - y).square().mean() + (predicted - y.mean()).abs().mean() + ranks)

    assert not _found(_observed(right, classes=False))


def test_models_that_others_are_trained_through_or_that_get_no_update_may_be_in_evaluation_mode() -> None:
    judge, makes = Loop(nn.Dropout(0.5)), Loop(outputs=4)
    judge.model.eval()

    def attacked(x: torch.Tensor, y: torch.Tensor) -> None:
        x.requires_grad_()
        functional.cross_entropy(judge.model(x), y).backward()
        judge.model.zero_grad()

    def through(x: torch.Tensor, y: torch.Tensor) -> None:
        makes.update(functional.cross_entropy(judge.model(makes.model(x)), y))

    for step in (attacked, through):
        calls = _observed(step)
        assert not _found(calls) | _found(calls, certain=False)


def test_one_of_two_models_that_are_trained_is_named_if_it_stays_in_evaluation_mode() -> None:
    makes, judges = Loop(nn.Dropout(0.5), outputs=4), Loop(nn.Dropout(0.5), outputs=1)
    makes.model.eval()

    def adversarial(x: torch.Tensor, y: torch.Tensor) -> None:
        judges.update(judges.model(x).mean() - judges.model(makes.model(x).detach()).mean())
        makes.update(judges.model(makes.model(x)).mean())

    assert _found(_observed(adversarial)) == {"trains-in-evaluation-mode"}


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_of_perturbed_weights_are_added_on_purpose(backwards: int) -> None:
    loop = Loop()
    (weight, *_) = loop.model.parameters()

    def adversarial(x: torch.Tensor, y: torch.Tensor, *, clear: bool = True) -> None:
        for _ in range(backwards):
            functional.cross_entropy(loop.model(x), y).backward()
        assert weight.grad is not None
        before = weight.detach().clone()
        weight.data.add_(weight.grad, alpha=0.1)
        functional.cross_entropy(loop.model(x), y).backward()
        weight.data.copy_(before)
        loop.optimizer.step()
        if clear:
            loop.optimizer.zero_grad()

    assert not _found(_observed(adversarial))
    assert _found(_observed(lambda x, y: adversarial(x, y, clear=False))) == {"gradients-not-cleared"}


def test_log_densities_policies_and_kernels_are_no_wrong_losses() -> None:
    loop, one = Loop(), Loop(outputs=1)
    centres = nn.Parameter(torch.randn(5))

    def policy(x: torch.Tensor, y: torch.Tensor) -> None:
        advantages = torch.randn(8, 1)
        loop.update(functional.nll_loss(loop.model(x).log_softmax(1) * advantages, y))

    def kernels(x: torch.Tensor, y: torch.Tensor) -> None:
        bumps = (y[:, None] - centres).square().mean()
        pairs = functional.smooth_l1_loss(one.model(x), y, reduction="none").mean()
        distances = (one.model(x) - y[None]).abs().mean()
        one.update(bumps + pairs + distances)

    assert not _found(_observed(policy))
    with pytest.warns(UserWarning, match="Using a target size"):
        calls = _observed(kernels, classes=False)
    assert not _found(calls)


def test_a_graph_that_is_traced_within_a_step_has_no_operations_of_the_observer() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = nn.Parameter(torch.randn(3, 4))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(functional.linear(x, weight).log_softmax(1), y)

    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    bare = [node.name for node in make_fx(loss)(x, y).graph.nodes]
    traced: list[list[str]] = []
    _observed(lambda x, y: traced.append([node.name for node in make_fx(loss)(x, y).graph.nodes]))
    assert traced == [bare] * 3


def test_a_layer_that_replaces_one_of_the_optimizers_is_named_with_its_shape() -> None:
    loop = Loop()
    loop.model[1] = nn.Linear(8, 3)
    calls = _observed(lambda x, y: loop.update(functional.cross_entropy(loop.model(x), y)))
    assert _found(calls) == {"left-out-of-optimizer"}
    assert calls.left_out == ("[3, 8]", "[3]")


def test_parameters_of_a_second_optimizer_that_are_frozen_or_updated_by_hand_are_not_left_out() -> None:
    loop, other = Loop(nn.Linear(8, 8)), nn.Linear(8, 8)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    by_hand = nn.Parameter(torch.randn(8, 8))
    frozen = nn.Linear(8, 8).requires_grad_(False)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        first, *others = loop.model
        hidden = functional.linear(frozen(other(first(x))), by_hand)
        second.zero_grad()
        by_hand.grad = None
        loop.update(functional.cross_entropy(nn.Sequential(*others)(hidden), y))
        second.step()
        assert by_hand.grad is not None
        by_hand.data.sub_(by_hand.grad, alpha=0.1)

    assert not _found(_observed(step))


def test_gradients_that_no_optimizer_uses_or_that_decay_are_not_named() -> None:
    student, teacher, scaled, normed = Loop(), Loop(), Loop(), Loop()

    def distilled(x: torch.Tensor, y: torch.Tensor) -> None:
        student.update(functional.mse_loss(student.model(x), teacher.model(x)))  # the teacher gets gradients, too
        with torch.no_grad():
            for average, weight in zip(teacher.model.parameters(), student.model.parameters(), strict=True):
                average.lerp_(weight, 0.1)

    def decayed(x: torch.Tensor, y: torch.Tensor) -> None:
        scaled.update(functional.cross_entropy(scaled.model(x), y), clear=False)
        for weight in scaled.model.parameters():
            assert weight.grad is not None
            weight.grad.mul_(0.9)  # momentum

    def accumulated(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.no_grad():
            for weight in normed.model.parameters():
                weight.mul_(0.99)
        functional.cross_entropy(normed.model(x), y).backward()  # over more batches than are observed

    for step in (distilled, decayed, accumulated):
        assert not _found(_observed(step))


class _LateDropout(nn.Module):
    """Dropout that begins in a later epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.dropout(self.first(x), 0.5, training=False))  # type: ignore[no-any-return]


def test_dropout_that_is_left_out_in_a_model_in_training_mode_is_no_evaluation_mode() -> None:
    alone, part = Loop(nn.Dropout(0.5)), Loop(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    alone.model[1].eval()
    part.model[1].eval()
    late = _LateDropout()
    optimizer = torch.optim.SGD(late.parameters(), lr=0.1)

    def later(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(late(x), y).backward()
        optimizer.step()

    for step in (later, lambda x, y: alone.update(functional.cross_entropy(alone.model(x), y))):
        calls = _observed(step)
        assert not _found(calls) | _found(calls, certain=False)
    calls = _observed(lambda x, y: part.update(functional.cross_entropy(part.model(x), y)))
    assert not _found(calls)
    assert _found(calls, certain=False) == {"trains-in-evaluation-mode"}


def test_losses_that_are_only_logged_are_not_named() -> None:
    loop, one = Loop(), Loop(outputs=1)

    def confidence(x: torch.Tensor, y: torch.Tensor) -> None:
        logits = loop.model(x)
        print(functional.nll_loss(logits.softmax(1), y).item())
        loop.update(functional.cross_entropy(logits, y))

    def spread(x: torch.Tensor, y: torch.Tensor) -> None:
        predicted = one.model(x)
        print((predicted - y).abs().mean().item())
        one.update(functional.mse_loss(predicted.squeeze(1), y))

    assert not _found(_observed(confidence))
    assert not _found(_observed(spread, classes=False))


def test_a_loss_whose_gradients_are_computed_by_autograd_grad_is_named() -> None:
    loop = Loop()

    def by_hand(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = functional.cross_entropy(loop.model(x).softmax(1), y)
        for weight, gradient in zip(
            loop.model.parameters(), torch.autograd.grad(loss, [*loop.model.parameters()]), strict=True
        ):
            weight.data.sub_(gradient)

    assert _found(_observed(by_hand)) == {"loss-of-probabilities"}


def test_numbers_that_were_made_a_column_are_meant_to_meet_all_labels() -> None:
    loop = Loop(outputs=1)

    def kernels(x: torch.Tensor, y: torch.Tensor) -> None:
        predicted = loop.model(x).squeeze(1)
        loop.update((predicted[:, None] - y).abs().mean() - (y.unsqueeze(1) - predicted).square().neg().exp().mean())

    assert not _found(_observed(kernels, classes=False))


def test_parameters_of_an_optimizer_that_waits_are_not_left_out() -> None:
    loop = Loop()
    (first, *_) = loop.model
    loop.optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    later = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    step: Step = lambda x, y: loop.update(functional.cross_entropy(loop.model(x), y))  # noqa: E731
    assert not _found(_observed(step))
    del later
    assert _found(_observed(step)) == {"left-out-of-optimizer"}
