"""The doctor on loops with one known problem each, and on healthy loops: the programs of benchmarks/pathologies.

Problems that show by durations are not looked for here, where other tests take the processor: `benchmarks.doctor`
counts how often they are found, and what it measured is the input here.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.doctor import examined, read_results
from benchmarks.pathologies import FOLDER, HEALTHY, PROBLEMS
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.rendering import render
from penstock.observe.record.known_fields import build_from_known

_RESULTS = Path(__file__).parents[3] / "benchmarks/results"
_RECORDED = read_results(_RESULTS / "doctor-2core.json") | read_results(_RESULTS / "doctor-2core-quick.json")


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize("script", [script for script, problem in PROBLEMS.items() if not problem.is_timed])
def test_a_problem_that_shows_without_durations_is_named_with_the_line_to_change(script: str) -> None:
    for patience in (1.0, 4.0, 16.0):  # beside other work it takes longer until enough has been seen
        found = examined(script, patience=patience)
        if found.mark in ("first", "named"):
            break
    assert found.mark in ("first", "named"), render(found.measurements, found.diagnosis)


@pytest.mark.parametrize("script", PROBLEMS)
def test_recorded_measurements_name_the_problem_with_the_line_to_change(script: str) -> None:
    rounds = _RECORDED[script]  # in one of two, 8 workers on 2 cores were faster than 3
    assert any(one.mark in ("first", "named") for one in rounds), [
        render(one.measurements, one.diagnosis) for one in rounds
    ]


@pytest.mark.parametrize("script", HEALTHY)
def test_recorded_measurements_of_a_healthy_loop_call_it_healthy(script: str) -> None:
    rounds = _RECORDED[script]
    assert all(one.mark == "first" for one in rounds), [render(one.measurements, one.diagnosis) for one in rounds]


def test_measurements_are_read_back_as_they_were() -> None:
    for rounds in _RECORDED.values():
        found = rounds[0].measurements
        assert build_from_known(Measurements, json.loads(json.dumps(asdict(found), default=repr))) == found


def test_every_program_is_tried() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {"__init__", "work", *PROBLEMS, *HEALTHY}
    assert set(_RECORDED) == {*PROBLEMS, *HEALTHY}
