"""The doctor on programs with one known problem each, of benchmarks/pathologies: those that show without durations.

Problems that show by durations are not looked for here, where other tests take the processor: `benchmarks.doctor`
counts how often they are found.
"""

from __future__ import annotations

import pytest

from benchmarks.doctor import examined
from benchmarks.pathologies import FOLDER, HEALTHY, PROBLEMS
from penstock.observe.doctor.rendering import render


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(
    "script",
    [
        "batches_beyond_shm",
        "copied_on_write",
        "cycled_loader",
        "quota_below_the_cores",
        "seed_in_every_sample",
        "split_overlaps",
        "stream_not_sharded",
        "trained_in_evaluation_mode",
    ],
)
def test_a_problem_that_shows_without_durations_is_named_with_the_line_to_change(script: str) -> None:
    assert not PROBLEMS[script].is_timed
    for patience in (1.0, 4.0, 16.0):  # beside other work it takes longer until enough has been seen
        found = examined(script, patience=patience)
        if found.mark in ("first", "named"):
            break
    assert found.mark in ("first", "named"), render(found.measurements, found.diagnosis)


def test_every_program_is_tried() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {"__init__", "work", *PROBLEMS, *HEALTHY}
