"""Copying ahead is kept where it pays, and dropped where it costs more than it hides."""

from __future__ import annotations

import time

import pytest
from sample_sets import Numbered

from penstock import DataLoader, Sim
from penstock.loader.to_device.prefetch_depth import BLOCK, PAIRS, DepthTrial

MEASURED = BLOCK * (2 * PAIRS + 1)
"""The steps after which a trial has decided."""


class Clock:
    """Time passes by so much per step, depending on whether copies run ahead."""

    def __init__(self, *, ahead_s: float, direct_s: float) -> None:
        self.now = 0.0
        self.step_s = {True: ahead_s, False: direct_s}
        self.settled = 0

    def __call__(self) -> float:
        return self.now

    def settle(self) -> None:
        self.settled += 1

    def run(self, trial: DepthTrial, steps: int) -> list[int]:
        depths = []
        for _ in range(steps):
            trial.step(self.settle)
            depths.append(trial.depth)
            self.now += self.step_s[trial.depth > 0]
        return depths


@pytest.mark.parametrize(
    ("ahead_s", "direct_s", "depth", "words"),
    [
        (0.010, 0.014, 2, "up to 2 ahead: a step took 10.00 ms with copies ahead and 14.00 ms without"),
        (0.010, 0.010, 2, "up to 2 ahead"),
        (0.012, 0.010, 0, "none ahead: a step took 12.00 ms with copies ahead and 10.00 ms without"),
    ],
)
def test_the_faster_way_is_kept_and_said(ahead_s: float, direct_s: float, depth: int, words: str) -> None:
    clock = Clock(ahead_s=ahead_s, direct_s=direct_s)
    trial = DepthTrial(2, clock)
    depths = clock.run(trial, MEASURED + 20)
    assert {0, 2} == set(depths[:MEASURED])
    assert set(depths[MEASURED:]) == {depth}
    assert trial.summary.startswith(words)


def test_the_device_is_waited_for_at_the_ends_of_blocks_only() -> None:
    clock = Clock(ahead_s=0.010, direct_s=0.014)
    clock.run(DepthTrial(2, clock), 1000)
    assert clock.settled <= 2 * (2 * PAIRS + 1)


def test_one_slow_block_does_not_drop_copies_ahead() -> None:
    clock = Clock(ahead_s=0.010, direct_s=0.010)
    trial = DepthTrial(2, clock)
    clock.run(trial, 2 * BLOCK + 1)
    clock.now += 1.0
    clock.run(trial, MEASURED)
    assert trial.depth == 2


def test_a_loader_decides_by_what_its_own_steps_took() -> None:
    device = Sim(bandwidth=2e9, delay_s=1e-3)
    loader = DataLoader(Numbered(8 * (MEASURED + 8)), batch_size=8, device=device)
    for _ in loader:
        time.sleep(2e-3)
    assert "with copies ahead" in loader.statistics().prefetch


def test_the_time_between_two_epochs_is_no_step() -> None:
    clock = Clock(ahead_s=0.010, direct_s=0.014)
    trial = DepthTrial(2, clock)
    for _ in range(12):
        clock.run(trial, BLOCK + 3)
        clock.now += 100.0
        trial.pause()
    assert trial.summary.startswith("up to 2 ahead: a step took 10.00 ms")
