"""What the epochs that a program begins after its trials show, and that nothing is written meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_sets import Numbered
from torch import save as save_by_its_name
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.causes.cause import ask
from penstock.observe.doctor.causes.epochs import not_shuffled, same_order
from penstock.observe.doctor.content_results import EpochOrders
from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import OtherLoop
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import StepCalls
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial
from penstock.observe.doctor.trials.batch_source import BatchSource, InlineSource, RepeatedBatchSource
from penstock.observe.doctor.trials.epochs.later_epochs import order_of
from penstock.observe.doctor.trials.examined_loop import run_loop
from penstock.observe.doctor.trials.time_budget import TrialsDoneError
from penstock.observe.doctor.trials.trial_scheduler import TrialScheduler

_SECONDS, _STEP_S = 4.0, 0.02


_OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


class Clock:
    """Seconds that pass by steps alone, which an optimizer takes, too."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += _STEP_S
        _OPTIMIZER.step()


def _run(program: Callable[[Callable[[], None]], None]) -> TrialScheduler:
    """Examine a program, which gets what it is to call in each step."""
    clock = Clock()
    scheduler = TrialScheduler(
        lambda loader, has_step: [
            (BatchSource if loader.num_workers else InlineSource)(AS_IS, lambda: loader),
            RepeatedBatchSource(FREE),
        ],
        _SECONDS,
        clock,
    )
    try:
        run_loop(lambda: program(clock.step), scheduler)
    except TrialsDoneError:
        pass
    finally:
        scheduler.close()
    return scheduler


def _orders(scheduler: TrialScheduler) -> EpochOrders | None:
    assert scheduler.later_epochs is not None
    return scheduler.later_epochs.result()


def _train(loader: DataLoader[Any], step: Callable[[], None]) -> None:
    for _ in loader:
        step()


_DATA = Numbered(64)


def _by_ranks(*, sets_epoch: bool, epochs: int = 50, num_workers: int = 0) -> Callable[[Callable[[], None]], None]:
    def program(step: Callable[[], None]) -> None:
        sampler = DistributedSampler(_DATA, num_replicas=2, rank=0)
        loader = DataLoader(_DATA, batch_size=4, sampler=sampler, num_workers=num_workers)
        for epoch in range(epochs):
            if sets_epoch:
                sampler.set_epoch(epoch)
            _train(loader, step)

    return program


def _finding(seen: EpochOrders | None) -> Any:
    measured = Measurements(name="", machine=Machine(), settings=_SETTINGS, has_step=True, epoch_orders=seen)
    return ask(same_order, measured)


_SETTINGS = Settings(dataset="Numbered")


@pytest.mark.parametrize("epochs", [2, 50])
def test_epochs_of_a_distributed_sampler_without_set_epoch_are_found_to_be_the_same(epochs: int) -> None:
    found = _finding(_orders(_run(_by_ranks(sets_epoch=False, epochs=epochs))))
    assert (found.name, found.is_uncertain) == ("same-order", False)
    assert "set_epoch(epoch)" in found.remedy
    assert _orders(_run(_by_ranks(sets_epoch=True, epochs=epochs))) is None


def test_workers_are_stopped_while_the_program_begins_its_next_epochs() -> None:
    seen = _orders(_run(_by_ranks(sets_epoch=False, num_workers=1)))
    assert seen is not None
    assert seen.epochs == 3


def _seeded_again(step: Callable[[], None]) -> None:
    loader = DataLoader(_DATA, batch_size=4, shuffle=True)
    while True:
        torch.manual_seed(0)
        _train(loader, step)


def _made_again_with_its_generator(step: Callable[[], None]) -> None:
    while True:
        _train(DataLoader(_DATA, shuffle=True, generator=torch.Generator().manual_seed(0)), step)


def _seeded_once(step: Callable[[], None]) -> None:
    torch.manual_seed(0)
    loader = DataLoader(_DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    while True:
        _train(loader, step)


@pytest.mark.parametrize(
    ("program", "is_found"),
    [(_seeded_again, True), (_made_again_with_its_generator, True), (_seeded_once, False)],
)
def test_a_generator_that_every_epoch_seeds_again_is_found(program: Any, is_found: bool) -> None:
    seen = _orders(_run(program))
    assert (seen is not None) == is_found
    if is_found:
        found = _finding(seen)
        assert (found.is_uncertain, "seed once" in found.remedy) == (False, True)


def test_two_loops_that_share_an_epoch_are_no_repetition() -> None:
    def program(step: Callable[[], None]) -> None:
        sampler = DistributedSampler(_DATA, num_replicas=2, rank=0)
        loader = DataLoader(_DATA, batch_size=4, sampler=sampler)
        for epoch in range(9):
            sampler.set_epoch(epoch)
            _train(loader, step)
            _train(loader, step)

    assert _orders(_run(program)) is None


def test_a_pass_over_the_training_data_without_gradients_is_no_epoch() -> None:
    def program(step: Callable[[], None]) -> None:
        sampler = DistributedSampler(_DATA, num_replicas=2, rank=0)
        loader = DataLoader(_DATA, batch_size=4, sampler=sampler)
        for epoch in range(9):
            sampler.set_epoch(epoch)
            _train(loader, step)
            with torch.no_grad():
                _train(loader, step)

    assert _orders(_run(program)) is None


class Fixed(Sampler[int]):
    """Has one order, for a reason of its own."""

    def __iter__(self) -> Any:
        return iter(range(63, -1, -1))

    def __len__(self) -> int:
        return 64


def test_an_order_that_a_sampler_of_the_users_repeats_may_be_meant() -> None:
    def program(step: Callable[[], None]) -> None:
        loader = DataLoader(_DATA, batch_size=4, sampler=Fixed())
        while True:
            _train(loader, step)

    assert _finding(_orders(_run(program))).is_uncertain


def test_looking_at_an_order_changes_no_order() -> None:
    generator = torch.Generator().manual_seed(4)
    for loader in (
        DataLoader(_DATA, batch_size=4, shuffle=True),
        DataLoader(_DATA, batch_size=None, sampler=RandomSampler(_DATA, generator=generator)),
    ):
        before = torch.get_rng_state(), generator.get_state()
        assert sorted(order_of(loader) or ()) == list(range(64))
        assert order_of(loader) == order_of(loader)
        assert all(map(torch.equal, before, (torch.get_rng_state(), generator.get_state())))


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("worse"),
        lambda file: file.unlink(),
        lambda file: file.rename(file.with_name("old")),
        lambda file: os.truncate(file, 0),
        lambda file: shutil.rmtree(file.parent),
        lambda file: subprocess.run(["rm", file], check=True),
        lambda file: torch.save([1], file),
        lambda file: save_by_its_name([1], file),
    ],
)
def test_a_program_changes_no_file_between_two_epochs(change: Callable[[Path], Any], tmp_path: Path) -> None:
    kept = tmp_path / "best.pt"
    kept.write_text("of many days")
    ends = []

    def program(step: Callable[[], None]) -> None:
        loader = DataLoader(_DATA, batch_size=4, shuffle=True)
        while True:
            _train(loader, step)
            ends.append(kept.read_text())
            change(kept)

    _run(program)
    assert (ends[0], kept.read_text()) == ("of many days", "of many days")
    change(tmp_path / "best.pt")  # as before, now that it is over
    assert not kept.exists() or kept.read_bytes() != b"of many days"


def test_a_program_that_saves_by_torch_goes_on_to_its_next_epochs() -> None:
    def program(step: Callable[[], None]) -> None:
        loader = DataLoader(_DATA, batch_size=4, sampler=DistributedSampler(_DATA, num_replicas=2, rank=0))
        while True:
            _train(loader, step)
            torch.save([1], "/nonexistent/best.pt")

    seen = _orders(_run(program))
    assert seen is not None
    assert seen.epochs == 3


def test_what_a_program_raises_after_the_trials_is_not_the_loops_error() -> None:
    def program() -> None:
        for _ in DataLoader(_DATA, batch_size=4, shuffle=True):
            _OPTIMIZER.step()
        raise ValueError("too few batches for a median")

    raised: list[Exception] = []
    found = examine(program, seconds=0.6, on_error=raised.append)
    assert (found.error, raised) == ("", [])


def test_training_in_the_datasets_order_is_named_under_perhaps_and_other_loops_are_not() -> None:
    seen = EpochOrders(sampler="SequentialSampler", epochs=3, is_sorted=True, is_meant_to_change=False, is_all=True)

    def found(*, trains: bool) -> Any:
        calls = StepCalls(steps=3, trains=trains)
        measured = Measurements(
            name="", machine=Machine(), settings=_SETTINGS, has_step=True, epoch_orders=seen, step_calls=calls
        )
        return ask(not_shuffled, measured)

    assert (found(trains=True).is_uncertain, found(trains=False)) == (True, None)
    assert _finding(seen) is None


def test_a_step_that_computes_gradients_trains() -> None:
    recorder = StepCallRecorder()
    weight = torch.ones(2, requires_grad=True)
    recorder.enter()
    loss = (weight * 2).sum()
    assert not recorder.result().trains
    loss.backward()
    recorder.leave()
    assert recorder.result().trains


def test_a_validation_that_starts_its_workers_after_every_epoch_is_found() -> None:
    def program(step: Callable[[], None]) -> None:
        loader = DataLoader(_DATA, batch_size=32, shuffle=True)
        while True:
            _train(loader, step)
            with torch.no_grad():
                for _ in DataLoader(Numbered(4), batch_size=2, num_workers=1):
                    pass

    (loop,) = _run(program).other_loops.results()
    assert (loop.starts, loop.loaders, loop.batches_between) == (2, 2, 2)


def _restarted(startup_s: float) -> list[str]:
    loop = OtherLoop(dataset="D", num_workers=1, starts=2, loaders=2, startup_s=startup_s, batches_between=100)
    window = TimingWindow(batches=10, wall_s=0.1, wait_s=0.0, step_s=0.1)  # so an epoch takes a second
    trials = (Trial(name=AS_IS, windows=(window,)),)
    return [
        one.name
        for one in diagnose(
            Measurements(
                name="", machine=Machine(), settings=_SETTINGS, has_step=True, trials=trials, other_loops=(loop,)
            )
        ).findings
    ]


def test_workers_that_start_once_per_epoch_count_by_what_they_take_of_an_epoch() -> None:
    assert _restarted(0.06) == []
    assert _restarted(0.3) == ["other-loader-restarted"]


def test_nothing_is_said_of_the_order_of_one_epoch() -> None:
    def program(step: Callable[[], None]) -> None:
        _train(DataLoader(_DATA, batch_size=4), step)

    seen = _orders(_run(program))
    assert seen is None
    measured = Measurements(name="", machine=Machine(), settings=_SETTINGS, has_step=True, epoch_orders=seen)
    assert not {"same-order", "not-shuffled"} & {one.name for one in diagnose(measured).findings}
    assert sys.dont_write_bytecode is _WRITES_NO_BYTECODE


_WRITES_NO_BYTECODE = sys.dont_write_bytecode
