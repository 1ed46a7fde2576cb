"""A step that runs out of memory, anywhere, ends as one that did not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from effort import places
from nested_equal import assert_same
from scarcity import Capacity, FailAt
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock import OptionError, OutOfMemoryError, TrainStep
from penstock.distributed import rank_group
from penstock.memory.cutting.micro_batch import MicroBatchSizes
from penstock.memory.cutting.split import bucket_of
from penstock.memory.gradient_accumulation import GradientAccumulation
from penstock.memory.optimizer import chunked_step
from penstock.memory.optimizer_stage import OptimizerStage, PartialGradientsError

pytestmark = pytest.mark.long

Make = Callable[[], tuple[TrainStep, Callable[[], dict[str, Any]]]]


class Net(nn.Module):
    """Dropout, BatchNorm, and weights that are tied."""

    def __init__(self, *, batch_norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if batch_norm else nn.LayerNorm(6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return found


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x) - y).square().mean(1).sum(), len(x)


def batches(count: int = 3, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)) for _ in range(count)
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.01),
    "SGD nesterov foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True
    ),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.01, foreach=True),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01, foreach=True),
}
EXTRAS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clipped": lambda: {"clip_grad_norm": 0.1},
    "scaled and clipped": lambda: {
        "scaler": torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2),
        "autocast": torch.bfloat16,
        "clip_grad_norm": 0.1,
    },
    "accumulated": lambda: {"accumulate": 2},
}


class Trained:
    """A model in training, and all of it that a failure could spoil."""

    def __init__(self, optimizer: str = "Adam", micro_batch: int | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net(batch_norm=options.pop("batch_norm", True))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = options.get("scaler")
        options.setdefault("allow_batch_dependent", ["BatchNorm1d"])
        self.step = TrainStep(self.model, self.optimizer, loss_fn, micro_batch=micro_batch, **options)
        self.losses: list[Tensor] = []

    def train(self, data: list[Any]) -> Trained:
        for batch in data:
            self.losses.append(self.step(batch))
        return self

    def state(self) -> dict[str, Any]:
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        return {
            **{f"model.{name}": value.clone() for name, value in self.model.state_dict().items()},
            **{f"grad.{name}": p.grad for name, p in self.model.named_parameters()},
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "random": torch.get_rng_state(),
            "losses": list(self.losses),
        }


def operations(made: Callable[[], Trained], data: list[Any], before: int) -> tuple[Trained, int]:
    """Return a clean run over `data`, and how many operations the steps after the first `before` batches took."""
    clean = made().train(data[:before])
    with FailAt() as counting:
        clean.train(data[before:])
    return clean, counting.count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        *((optimizer, "plain") for optimizer in OPTIMIZERS),
        *((optimizer, extra) for optimizer in ("SGD", "AdamW foreach", "AdamW fused") for extra in list(EXTRAS)[1:]),
    ],
)
def test_one_failure_at_any_operation_changes_nothing(optimizer: str, extra: str) -> None:
    def made() -> Trained:
        return Trained(optimizer, micro_batch=3, **EXTRAS[extra]())

    data = batches(4)
    for before in (0, 2):  # the first step, which makes the optimizer's state, and a later one
        stretch = data[: before + (2 if extra == "accumulated" else 1)]
        clean, count = operations(made, stretch, before)
        expected = clean.state()
        assert count > 50
        for number in places(count, f"{optimizer}, {extra}, {before}", stride=6):
            failing = made().train(stretch[:before])
            with FailAt([number]):
                failing.train(stretch[before:])
            assert_same(failing.state(), expected, f"{number}")
            assert failing.step.statistics().out_of_memory == 1
            assert failing.step.statistics().steps == clean.step.statistics().steps


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop"])
def test_a_chunked_step_survives_a_failure_at_any_operation(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory stays short, parameters are stepped in chunks that are undone when they fail."""
    monkeypatch.setattr(chunked_step, "CPU_CHUNK_NBYTES", 400)  # two or three chunks

    def made() -> Trained:
        trained = Trained(optimizer, clip_grad_norm=0.1)
        trained.step._transaction.is_careful = True
        return trained

    data = batches(2)
    clean, count = operations(made, data, 1)
    assert_same(clean.state(), Trained(optimizer, clip_grad_norm=0.1).train(data).state())
    expected = clean.state()
    for number in places(count, optimizer):
        failing = made().train(data[:1])
        with FailAt([number]):
            failing.train(data[1:])
        assert_same(failing.state(), expected, f"{number}")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW foreach"])
def test_two_failures_anywhere_change_nothing(optimizer: str) -> None:
    def made() -> Trained:
        return Trained(optimizer, micro_batch=6, clip_grad_norm=0.1)

    data = batches(1)
    _, count = operations(made, data, 0)
    expected: dict[int, Any] = {}
    for first in places(count, f"first, {optimizer}", stride=11):
        for second in places(count + 39 - first, f"{first}, {optimizer}", stride=17):
            failing = made()
            with FailAt([first, first + 1 + second]):
                failing.train(data)
            size = failing.step.statistics().micro_batch
            assert size in (6, 3)  # the second failure may meet the second attempt at the whole batch
            if size not in expected:
                expected[size] = Trained(optimizer, micro_batch=size, clip_grad_norm=0.1).train(data).state()
            assert_same(failing.state(), expected[size], f"{first}, {second}")


# ── memory that stays short ─────────────────────────────────────────────────────────────────────────────────────


def deep(width: int = 32, layers: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh()))).double()


def double_batch(size: int, width: int = 32, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(size, length, width, generator=generator, dtype=torch.float64),
        torch.randn(size, length, width, generator=generator, dtype=torch.float64),
    )


def sum_of_squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def peak_with(micro_batch: int, batch: Any) -> int:
    model = deep()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), sum_of_squares, micro_batch=micro_batch)
    with Capacity() as memory:
        step(batch)
        step(batch)
    return memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("fitting", [32, 16, 4, 1])
def test_training_continues_at_the_largest_size_that_fits_with_the_gradient_of_the_whole_batch(fitting: int) -> None:
    batch = double_batch(64)
    whole, cut = deep(), deep()
    steps = [TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), sum_of_squares) for model in (whole, cut)]
    room = (peak_with(fitting, batch) + peak_with(2 * fitting, batch)) // 2
    with Capacity(room) as memory:
        for _ in range(8):
            steps[1](batch)
            with _disable_current_modes():
                steps[0](batch)
                assert (gradients(whole) - gradients(cut)).abs().max() < 1e-12 * gradients(whole).abs().max()
        assert memory.peak <= room
    statistics = steps[1].statistics()
    assert statistics.micro_batch is not None
    assert fitting <= statistics.micro_batch < 2 * fitting
    assert statistics.steps == 8
    assert steps[1](batch).item() == pytest.approx(steps[0](batch).item(), rel=1e-12)


def test_a_sample_that_does_not_fit_is_an_error_that_leaves_no_trace() -> None:
    model = deep()
    optimizer = torch.optim.Adam(model.parameters())
    step = TrainStep(model, optimizer, sum_of_squares)
    before, batch = copy.deepcopy(model.state_dict()), double_batch(4)
    with pytest.raises(OutOfMemoryError), Capacity(20_000):
        step(batch)
    assert_same(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    assert step(double_batch(4)).item() > 0
    assert step.statistics().steps == 1


def test_sizes_are_remembered_and_grow_when_memory_is_free_again() -> None:
    batch = double_batch(32)
    model = deep()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.001), sum_of_squares)
    step._accumulation.policy.sizes = MicroBatchSizes(patience=3)
    room = (peak_with(8, batch) + peak_with(16, batch)) // 2
    with Capacity(room):
        for _ in range(3):
            step(batch)
    failures = step.statistics().out_of_memory
    assert step.statistics().micro_batch in range(8, 16)
    seen = []
    for _ in range(20):
        step(batch)
        seen.append(step.statistics().micro_batch)
    assert seen[-1] == 32
    assert step.statistics().out_of_memory == failures


def test_a_long_sample_does_not_make_short_ones_small() -> None:
    sizes = MicroBatchSizes()
    long, short = bucket_of([torch.zeros(8, 4000)]), bucket_of([torch.zeros(8, 100)])
    sizes.record_failure(long, 8)
    assert sizes.count_parts(long, 8) == 2
    assert sizes.count_parts(short, 8) == 1


# ── what a loss is divided by ───────────────────────────────────────────────────────────────────────────────────


class Tokens(nn.Module):
    """A tiny language model in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 11, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.embedding(tokens)))
        return found


def ragged(size: int, seed: int = 0) -> dict[str, Any]:
    """Sequences whose targets are padded (-100) by very different amounts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (size, 20), generator=generator)
    targets = torch.randint(0, 11, (size, 20), generator=generator)
    lengths = torch.randint(1, 21, (size,), generator=generator)
    targets[torch.arange(20)[None, :] >= lengths[:, None]] = -100
    return {"tokens": tokens, "targets": targets, "names": [f"text {i}" for i in range(size)]}


def token_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    scores = model(batch["tokens"])
    assert len(batch["names"]) == len(batch["tokens"])
    total = nn.functional.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return total, (batch["targets"] != -100).sum()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("micro_batch", [None, 1, 4])
def test_ragged_token_counts_weigh_as_in_the_whole_batch(micro_batch: int | None, accumulate: int) -> None:
    parts = [ragged(7, seed) for seed in range(accumulate)]
    cut, whole = Tokens(), Tokens()
    step = TrainStep(
        cut,
        torch.optim.SGD(cut.parameters(), lr=0.1),
        token_loss,
        micro_batch=micro_batch,
        accumulate=accumulate,
    )
    losses = [step(part) for part in parts]
    tokens, targets = (torch.cat([part[key] for part in parts]) for key in ("tokens", "targets"))
    expected = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
    expected.backward()
    assert (gradients(cut) - gradients(whole)).abs().max() < 1e-12
    if accumulate == 1:
        assert losses[0].item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_batch_that_is_run_whole_has_the_gradients_of_its_mean_to_the_bit(kind: Callable[[Any], Any]) -> None:
    batch, ours, whole = ragged(7), Tokens().float(), Tokens().float()

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        total, count = token_loss(model, batch)
        return total, kind(count.item())

    step = TrainStep(ours, torch.optim.SGD(ours.parameters(), lr=0.1), loss_fn)
    loss = step(batch)
    total, count = token_loss(whole, batch)
    assert count.item() not in (7, 8)
    (total / count).backward()
    assert torch.equal(gradients(ours), gradients(whole))
    assert torch.equal(loss, (total / count).detach())


def test_a_batch_without_weight_gives_zero_gradients_and_no_nan() -> None:
    model = Tokens()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss)
    batch = ragged(4)
    batch["targets"][:] = -100
    assert step(batch).item() == 0
    assert gradients(model).abs().max() == 0


# ── one step per batch ──────────────────────────────────────────────────────────────────────────────────────────


def test_schedulers_and_hooks_are_called_once_per_step() -> None:
    calls: list[str] = []
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = TrainStep(
        model, optimizer, sum_of_squares, scheduler=scheduler, accumulate=2, after_step=lambda: calls.append("step")
    )
    batch = double_batch(3)
    for number in range(4):
        with FailAt([10 * number]):
            step(batch)
    assert calls == ["step", "step"]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not step.flush()
    step(double_batch(3))
    assert step.flush()
    assert len(calls) == 3


def test_step_hooks_of_the_optimizer_run_once() -> None:
    calls: list[str] = []
    model = deep(64)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    step = TrainStep(model, optimizer, sum_of_squares)
    step(double_batch(2, 64))
    assert calls == ["post"]


def test_a_step_that_the_scaler_skips_is_counted_and_does_not_step_the_scheduler() -> None:
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = TrainStep(model, optimizer, sum_of_squares, scaler=scaler, scheduler=scheduler)
    before = copy.deepcopy(model.state_dict())
    step((torch.full((2, 32), float("inf"), dtype=torch.float64), torch.zeros(2, 32, dtype=torch.float64)))
    assert_same(model.state_dict(), before)
    assert step.statistics().skipped == 1
    assert scaler.get_scale() == 2.0
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_another_error_is_raised_and_leaves_the_window_as_it_was() -> None:
    def fussy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        if torch.isnan(batch[0]).any():
            raise ValueError("not a number")
        return sum_of_squares(model, batch)

    model, other = deep(), deep()
    bad = (torch.full((3, 32), float("nan"), dtype=torch.float64), torch.zeros(3, 32, dtype=torch.float64))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), fussy, accumulate=2)
    step(double_batch(3))
    with pytest.raises(ValueError, match="not a number"):
        step(bad)
    step(double_batch(5))
    clean = TrainStep(other, torch.optim.SGD(other.parameters(), lr=0.1), fussy, accumulate=2)
    clean(double_batch(3))
    clean(double_batch(5))
    assert_same(model.state_dict(), other.state_dict())


class Flaky(torch.optim.Optimizer):
    """Not one of torch's: steps a parameter, and fails before the next, `failures` times."""

    failures = 0  # of the class: what the optimizer itself remembers is restored

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for number, p in enumerate(group["params"]):
                if number == 3 and Flaky.failures:
                    Flaky.failures -= 1
                    raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
                with torch.no_grad():
                    p.sub_(group["lr"] * p.grad)
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1


def test_an_optimizer_of_the_users_that_fails_in_its_middle_is_undone() -> None:
    models = [deep(), deep()]
    optimizers = [Flaky(model.parameters()) for model in models]
    steps = [TrainStep(m, o, sum_of_squares) for m, o in zip(models, optimizers, strict=True)]
    for step, Flaky.failures in zip(steps, (0, 2), strict=True):
        step(double_batch(4))
    assert not Flaky.failures
    assert_same(models[0].state_dict(), models[1].state_dict())
    assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_step_that_fails_for_good_is_finished_by_the_next_call() -> None:
    models = [deep(), deep()]
    optimizers = [Flaky(model.parameters()) for model in models]
    steps = [TrainStep(m, o, sum_of_squares) for m, o in zip(models, optimizers, strict=True)]
    Flaky.failures = 1000
    with pytest.raises(OutOfMemoryError, match="the next call resumes from there"):
        steps[1](double_batch(4))
    Flaky.failures = 0
    steps[1](double_batch(5))
    steps[0](double_batch(4))
    steps[0](double_batch(5))
    assert_same(models[0].state_dict(), models[1].state_dict())


# ── layers that look at the whole batch ─────────────────────────────────────────────────────────────────────────


def test_batch_norm_is_not_cut_unless_it_is_allowed_by_name() -> None:
    with pytest.raises(OptionError, match=r"BatchNorm1d \('norm'\).*allow_batch_dependent=\('BatchNorm1d',\)"):
        Trained(micro_batch=2, allow_batch_dependent=[]).train(batches(1))
    Trained(micro_batch=2, allow_batch_dependent=["norm"]).train(batches(1))
    Trained(micro_batch=2, allow_batch_dependent=[nn.BatchNorm1d]).train(batches(1))
    Trained(micro_batch=None, allow_batch_dependent=[]).train(batches(1))


def test_a_batch_that_does_not_fit_and_must_not_be_cut_is_an_error_with_the_layer() -> None:
    made = Trained(allow_batch_dependent=[])
    with pytest.raises(OutOfMemoryError, match=r"The batch was not cut: BatchNorm1d \('norm'\)"), FailAt([20, 45]):
        made.train(batches(1))


def norm_of_vectors() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def squares_where(model: nn.Module, x: Tensor, fits: int) -> tuple[Tensor, int]:
    if len(x) > fits:
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
    return model(x).square().sum(), len(x)


@pytest.mark.filterwarnings("ignore:seen is changed by loss_fn")
def test_no_part_with_a_batch_norm_has_a_single_sample() -> None:
    seen: list[int] = []

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        found = squares_where(model, x, 3)
        seen.append(len(x))
        return found

    model = norm_of_vectors()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn, allow_batch_dependent=["BatchNorm1d"])
    step(torch.randn(5, 3))
    assert seen[-2:] == [3, 2]
    assert int(model[1].num_batches_tracked) == 2  # type: ignore[index, arg-type]


@pytest.mark.parametrize(("micro_batch", "fits"), [(2, 9), (None, 2)])
def test_a_batch_that_leaves_a_batch_norm_one_sample_is_refused_with_the_reason(
    micro_batch: int | None, fits: int
) -> None:
    model = norm_of_vectors()
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters()),
        functools.partial(squares_where, fits=fits),
        micro_batch=micro_batch,
        allow_batch_dependent=["BatchNorm1d"],
    )
    with pytest.raises((OptionError, OutOfMemoryError), match="batch norm has no variance of a single sample"):
        step(torch.randn(5, 3))


def test_wrong_arguments_are_rejected() -> None:
    model = deep()
    with pytest.raises(OptionError, match="LBFGS evaluates the loss by itself"):
        TrainStep(model, torch.optim.LBFGS(model.parameters()), sum_of_squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, words in (
        ({"micro_batch": 0}, "at least 1"),
        ({"micro_batch": "most"}, "'auto' or None"),
        ({"micro_batch": 2.0}, "a number of samples, at least 1, or 'auto' or None, not 2.0"),
        ({"accumulate": 0}, "at least 1"),
        ({"accumulate": 2.5}, "a number of batches"),
        ({"autocast": "bfloat16"}, "a dtype, as in torch.bfloat16"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}, "step it yourself"),
    ):
        with pytest.raises(OptionError, match=words):
            TrainStep(model, optimizer, sum_of_squares, **options)  # type: ignore[arg-type]


def test_a_numpy_integer_is_a_micro_batch() -> None:
    step = Trained(micro_batch=np.int64(2)).train(batches(1)).step  # type: ignore[arg-type]
    assert step.statistics().micro_batch == 2


@pytest.mark.parametrize("answer", [lambda loss: loss, lambda loss: (loss, None), lambda loss: (loss.item(), 1)])
def test_a_loss_without_its_weight_is_rejected_with_a_reason(answer: Callable[[Tensor], Any]) -> None:
    model = deep()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: answer(m(b[0]).sum()))
    with pytest.raises(OptionError, match="must return two things"):
        step(double_batch(2))


class Late(nn.Module):
    """Has a buffer that is None at first, and makes another one as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
        mean = found.detach().mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        self.count += 1
        return found - self.mean


def test_buffers_that_a_failed_attempt_added_are_removed() -> None:
    def trained(numbers: list[int]) -> tuple[dict[str, Any], int]:
        torch.manual_seed(0)
        model = Late()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, optimizer, loss_fn, micro_batch=3, allow_batch_dependent=True)
        batch = batches(1)[0]
        with FailAt(numbers) as memory:
            step(batch)
        return model.state_dict(), memory.count

    expected, count = trained([])
    for number in range(count):
        assert_same(trained([number])[0], expected, f"{number}")


@pytest.mark.slow
def test_an_operation_of_an_average_or_a_schedule_is_retried() -> None:
    def trained(numbers: list[int]) -> tuple[dict[str, Any], Any, int]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        average = torch.optim.swa_utils.AveragedModel(model)
        step = TrainStep(
            model,
            optimizer,
            loss_fn,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            after_step=lambda: average.update_parameters(model),
        )
        first, second = batches(2)
        step(first)
        with FailAt(numbers) as memory:
            step(second)
        return average.state_dict(), optimizer.state_dict(), memory.count

    *expected, count = trained([])
    for number in range(count):
        assert_same(trained([number])[:2], tuple(expected), f"{number}")


def test_gradients_that_could_not_be_recomputed_are_recomputed_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [deep(), deep()]
    steps = [TrainStep(m, torch.optim.SGD(m.parameters(), lr=0.1), sum_of_squares, clip_grad_norm=9.0) for m in models]

    def fail_in_part(stage: OptimizerStage) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(GradientAccumulation, "compute", failing)
        raise PartialGradientsError

    def failing(accumulation: GradientAccumulation) -> Tensor:
        monkeypatch.undo()
        raise OutOfMemoryError("out of memory")

    monkeypatch.setattr(OptimizerStage, "run", fail_in_part)
    with pytest.raises(OutOfMemoryError):
        steps[1](double_batch(4))
    steps[1](double_batch(5))
    steps[0](double_batch(4))
    steps[0](double_batch(5))
    assert_same(models[1].state_dict(), models[0].state_dict())


def test_models_whose_ranks_communicate_inside_forward_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(nn.Linear):
        pass

    monkeypatch.setattr(rank_group, "FullyShardedDataParallel", Sharded)
    model = nn.Sequential(Sharded(2, 2))
    with pytest.raises(OptionError, match=r"fully_shard \(FSDP2\), or step it by hand"):
        TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), sum_of_squares)

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.SyncBatchNorm(2)

    monkeypatch.setattr(rank_group, "DistributedDataParallel", Parallel)
    with pytest.raises(OptionError, match="SyncBatchNorm communicates with the other ranks"):
        TrainStep(Parallel(), torch.optim.SGD(model.parameters(), lr=0.1), sum_of_squares)
    with pytest.raises(OptionError, match=r"DistributedDataParallel is inside a Sequential.*make it the outermost"):
        TrainStep(nn.Sequential(Parallel()), torch.optim.SGD(model.parameters(), lr=0.1), sum_of_squares)


@pytest.mark.slow
def test_a_compiled_model_has_the_gradients_of_the_whole_batch() -> None:
    """Under a compiler no dispatch mode sees the operations; so the model's own operation fails."""
    torch._dynamo.reset()
    results = []
    for most_rows in (8, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        compiled = torch.compile(model, backend="eager")

        def compute(_: nn.Module, batch: Any, most_rows: int = most_rows, run: Any = compiled) -> tuple[Tensor, int]:
            rows: Tensor = run(batch)
            rows.register_hook(lambda grad: short_of_memory(grad, most_rows))
            return rows.square().sum(), len(batch)

        step = TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), compute)
        for size in (8, 7, 8, 5):
            step(torch.linspace(-1, 1, size * 6).reshape(size, 6))
        results.append([p.detach().clone() for p in model.parameters()])
        assert step.statistics().out_of_memory == (0 if most_rows == 8 else 4)
        assert step.statistics().micro_batch == (5 if most_rows == 8 else 3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def short_of_memory(grad: Tensor, most_rows: int) -> None:
    if len(grad) > most_rows:
        raise torch.OutOfMemoryError(f"tried to allocate 1.00 GiB for {len(grad)} rows")


def test_a_step_that_is_called_while_it_runs_says_so_and_stays_usable() -> None:
    model = nn.Linear(3, 1)

    def calling(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        if len(batch) == 2:
            step(batch[:1])
        return model(batch).sum(), len(batch)

    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), calling)
    with pytest.raises(OptionError, match="called already, by another thread or by what it calls"):
        step(torch.ones(2, 3))
    step(torch.ones(3, 3))
    assert step.statistics().steps == 1
