"""What is said of a comparison follows from both stretches and their spread."""

from __future__ import annotations

import pytest

from penstock.observe.baseline import Baseline, Stretch


def stretch(batch_s: float, waited: float, *, noise: float = 0.01) -> Stretch:
    laps = [batch_s * (1 + noise * (-1) ** (number // 10)) for number in range(80)]
    return Stretch.of(laps, [lap * waited for lap in laps], 80 * 4)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        pytest.param(stretch(0.02, 0.6), stretch(0.01, 0.2), "2.00 times the speed", id="faster"),
        pytest.param(stretch(0.02, 0.01), stretch(0.02, 0.01), "no gain: your loop is compute-bound", id="bound"),
        pytest.param(stretch(0.02, 0.01), stretch(0.03, 0.3), "slower: 0.67 times", id="slower, honestly"),
        pytest.param(
            stretch(0.020, 0.3, noise=0.3), stretch(0.019, 0.3, noise=0.3), "no gain that can be told", id="noise"
        ),
        pytest.param(stretch(0.0201, 0.3), stretch(0.02, 0.3, noise=0), "no gain that can be told", id="too little"),
    ],
)
def test_the_verdict_is_honest(theirs: Stretch, ours: Stretch, words: str) -> None:
    found = Baseline(warm_up=10, torch=theirs, penstock=ours)
    assert words in found.verdict()
    assert "waited for torch's loader" in found.verdict()
    assert "batches 11 to 90 of each" in found.render()


def test_without_a_comparison_the_reason_is_said() -> None:
    found = Baseline(warm_up=10, problem="the program is too short")
    assert found.gain is None
    assert found.verdict() == "no comparison: the program is too short"


def test_the_spread_of_a_stretch_is_that_of_its_batches_and_of_its_eighths() -> None:
    laps = [1.0] * 40 + [3.0] * 40
    found = Stretch.of(laps, [0.5] * 80, None)
    assert found.batch_s == pytest.approx(2.0)
    assert found.waited_share == pytest.approx(0.25)
    assert found.batch_quartiles_s == (1.0, 2.0, 3.0)
    assert found.block_quartiles_s == (1.0, 2.0, 3.0)
