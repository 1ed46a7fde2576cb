"""Copying ahead is kept where it pays, and dropped where it costs more than it hides."""

from __future__ import annotations

import pytest

from penstock.feed.depth import DepthTrial


class Clock:
    """Time passes by so much per step, depending on whether copies run ahead."""

    def __init__(self, *, ahead_s: float, direct_s: float) -> None:
        self.now = 0.0
        self.step_s = {True: ahead_s, False: direct_s}

    def __call__(self) -> float:
        return self.now

    def run(self, trial: DepthTrial, steps: int) -> list[int]:
        depths = []
        for _ in range(steps):
            trial.step()
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
    depths = clock.run(trial, 60)
    assert {0, 2} == set(depths[:33])
    assert set(depths[33:]) == {depth}
    assert trial.evidence.startswith(words)


def test_the_time_between_two_epochs_is_no_step() -> None:
    clock = Clock(ahead_s=0.010, direct_s=0.014)
    trial = DepthTrial(2, clock)
    for _ in range(12):
        clock.run(trial, 5)
        clock.now += 100.0
        trial.pause()
    assert trial.evidence.startswith("up to 2 ahead: a step took 10.00 ms")
