"""What the page shows follows from the record, and adds up."""

from __future__ import annotations

import dataclasses

import made_runs
import pytest

from penstock.core.stats import StageTimes
from penstock.observe.record.formatting import time_text
from penstock.observe.record.time_parts import bars
from penstock.observe.report.headline import headline
from penstock.observe.report.palette import DARK, LIGHT
from penstock.observe.report.view import build_view


def test_the_parts_of_the_training_process_add_up_to_its_loops_and_the_rest_is_said() -> None:
    for run in (made_runs.ordinary(), made_runs.inline()):
        bar = bars(run)[0]
        assert bar.amount == pytest.approx(run.totals.loop_s)
        assert f"{time_text(run.wall_s - bar.amount)} more were outside of loops" in bar.note


def test_without_workers_there_is_no_bar_of_workers_and_making_samples_is_the_loops_own_time() -> None:
    process, *others = bars(made_runs.inline())
    assert not others
    step, waiting = process.parts
    assert (step.label, waiting.label) == ("step", "waiting for data")
    assert [part.label for part in waiting.parts] == ["read+decode", "collate", "transport"]


def test_nested_loops_do_not_claim_to_add_up_to_the_wall_clock() -> None:
    run = dataclasses.replace(made_runs.ordinary(), wall_s=1.0)
    assert "exceeds the wall clock" in bars(run)[0].note


@pytest.mark.parametrize(
    ("stages", "settings", "words"),
    [
        ({"step_s": 99.0, "wait_s": 1.0}, {}, "Loading is hidden: your step waited for data 1.0 % of the time."),
        ({"step_s": 92.0, "wait_s": 8.0}, {}, "Loading is nearly hidden: your step waited for data 8.0 % of the time."),
        (
            {"step_s": 85.0, "wait_s": 15.0, "fetch_s": 9.0},
            {},
            "Your step waited for data 15 % of the time, mostly for reading and decoding in the workers.",
        ),
        (
            {"step_s": 5.0, "wait_s": 5.0, "fetch_s": 9.0},
            {},
            "Loading is the bottleneck: your step waited for",
        ),
        ({"step_s": 5.0, "wait_s": 5.0, "collate_s": 9.0}, {}, "mostly for collating samples in the workers"),
        ({"step_s": 5.0, "transport_s": 5.0}, {}, "mostly for the transport of batches"),
        (
            {"step_s": 5.0, "wait_s": 5.0},
            {"first_batch_s": 2.4, "epochs": 2},
            "the first batch of an epoch, 2.4 s each",
        ),
        ({"step_s": 5.0, "wait_s": 1.0, "workers_s": 4.0}, {}, "mostly for workers to start and to stop."),
        (
            {"step_s": 5.0, "wait_s": 5.0, "fetch_s": 9.0, "asleep_s": 8.0},
            {},
            "mostly for samples that wait themselves, for a disk, a network or a lock, in the workers.",
        ),
        (
            {"step_s": 5.0, "fetch_s": 5.0},
            {"worker_type": "inline"},
            "for reading and decoding in the loop itself, without",
        ),
    ],
)
def test_the_headline_names_how_much_was_waited_and_why(stages: dict, settings: dict, words: str) -> None:
    one = made_runs.loader("Images", 10, StageTimes(**stages))
    one = dataclasses.replace(one, statistics=dataclasses.replace(one.statistics, **settings))
    run = dataclasses.replace(made_runs.empty(), loaders=(one,))
    assert words in headline(run).text


def test_the_gain_that_the_headline_promises_at_most_is_what_the_waiting_took() -> None:
    one = made_runs.loader("Images", 10, StageTimes(step_s=5.0, wait_s=5.0))
    assert "2.00×" in headline(dataclasses.replace(made_runs.empty(), loaders=(one,))).more


def test_of_several_loaders_the_headline_names_the_one_that_was_waited_for() -> None:
    quick, slow = (made_runs.loader(name, 9, StageTimes(step_s=5.0, wait_s=s)) for name, s in (("A", 1.0), ("B", 5.0)))
    words = headline(dataclasses.replace(made_runs.empty(), loaders=(quick, slow))).more
    assert "Most of the waiting was in the loop over B, 50 % of its time." in words
    assert "Most of the waiting" not in headline(dataclasses.replace(made_runs.empty(), loaders=(slow, slow))).more


def test_a_gain_that_was_not_measured_is_called_an_estimate() -> None:
    measured, guessed = build_view(made_runs.ordinary()).findings
    assert measured.gain == "1.45× the speed (measured)"
    assert guessed.gain == "1.20× the speed (an estimate)"


def test_a_gain_of_one_loader_is_not_taken_for_that_of_the_whole_run() -> None:
    run = made_runs.ordinary()
    findings = tuple(dataclasses.replace(finding, loader="Images (train.py:3)") for finding in run.findings)
    assert build_view(dataclasses.replace(run, findings=findings)).findings[0].gain == (
        "1.45× the speed of that loop (measured)"
    )


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_words_and_shapes_stand_out_from_their_ground(colours: dict[str, str]) -> None:
    for role in ("ink", "muted", "accent", "good", "bad"):
        assert min(_contrast(colours[role], colours[ground]) for ground in ("card", "ground")) >= 4.5, role
    assert _contrast(colours["accent"], colours["tint"]) >= 4.5
    for role in colours.keys() - {"ground", "card", "rule", "tint", "idle"}:
        assert _contrast(colours[role], colours["card"]) >= 3, role


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
