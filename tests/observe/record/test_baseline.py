"""The verdict of a comparison follows from both timing windows and their spread."""

from __future__ import annotations

import pytest

from penstock.observe.record.baseline import Baseline, TimingWindow


def window(batch_s: float, waited: float, *, noise: float = 0.01) -> TimingWindow:
    intervals_s = [batch_s * (1 + noise * (-1) ** (number // 10)) for number in range(80)]
    return TimingWindow.of(intervals_s, [interval_s * waited for interval_s in intervals_s], 80 * 4)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        pytest.param(window(0.02, 0.6), window(0.01, 0.2), "2.00 times the speed", id="faster"),
        pytest.param(window(0.02, 0.01), window(0.02, 0.01), "no gain: your loop is compute-bound", id="bound"),
        pytest.param(window(0.1, 0.03), window(0.097, 0.001), "no gain: your loop is compute-bound", id="bound, clear"),
        pytest.param(
            window(0.1, 0.04, noise=0.2),
            window(0.12, 0.1, noise=0.2),
            "no gain: your loop is",
            id="bound, on a busy machine",
        ),
        pytest.param(
            window(0.02, 0.01), window(0.03, 0.3), "slower: 0.67 times the speed with torch's loader; ", id="slower"
        ),
        pytest.param(window(0.01, 0.3), window(0.02, 0.1), "by the program's own step (18.00 ms", id="a slower step"),
        pytest.param(
            window(0.020, 0.3, noise=0.3), window(0.019, 0.3, noise=0.3), "no gain beyond the spread", id="noise"
        ),
        pytest.param(window(0.0201, 0.3), window(0.02, 0.3, noise=0), "no gain beyond the spread", id="too little"),
    ],
)
def test_the_verdict_is_honest(theirs: TimingWindow, ours: TimingWindow, words: str) -> None:
    found = Baseline(warmup_batches=10, torch=theirs, penstock=ours)
    assert words in found.verdict()
    assert "waited for torch's loader" in found.verdict()
    assert "batches 11 to 90 of each" in found.render()


def test_batches_of_loaders_that_were_not_replaced_are_told_apart() -> None:
    found = Baseline(warmup_batches=10, torch=window(0.02, 0.6), penstock=window(0.01, 0.2), left_alone=30)
    assert "30 of penstock's batches came from loaders that were not replaced" in found.render()


def test_without_a_comparison_the_reason_is_reported() -> None:
    found = Baseline(warmup_batches=10, problem="the program is too short")
    assert found.speedup is None
    assert found.verdict() == "no comparison: the program is too short"


def test_the_spread_of_a_window_is_that_of_its_batches_and_of_its_eighths() -> None:
    intervals_s = [1.0] * 40 + [3.0] * 40
    found = TimingWindow.of(intervals_s, [0.5] * 80, None)
    assert found.batch_s == pytest.approx(2.0)
    assert found.stall_fraction == pytest.approx(0.25)
    assert found.batch_quartiles_s == (1.0, 2.0, 3.0)
    assert found.block_quartiles_s == (1.0, 2.0, 3.0)
