"""Two runs side by side: the figures, and what makes them not comparable."""

from __future__ import annotations

import dataclasses

import made_runs

from penstock.core.stats import StageTimes
from penstock.observe.record import comparison_text
from penstock.observe.record.compare_runs import Difference, compare_runs
from penstock.observe.record.run_summary import summarize_run


def _run(*, samples_factor: int = 1, wait_s: float = 5.0, **settings: object):
    one = made_runs.loader(
        "Images", 10 * samples_factor, StageTimes(step_s=5.0, wait_s=wait_s, fetch_s=8.0), **settings
    )
    return dataclasses.replace(made_runs.empty(), command=("train.py",), loaders=(one,))


def test_a_run_is_the_same_as_itself() -> None:
    run = made_runs.ordinary()
    comparison = compare_runs(run, run, "again.json")
    assert (comparison.settings, comparison.caveats) == ((), ())
    assert "No significant difference in throughput (1.00×) to again.json" in comparison_text.render(
        run, comparison, "run.json"
    )


def test_a_faster_run_is_said_to_be_so_with_the_figures_of_both() -> None:
    text = comparison_text.render(
        _run(wait_s=0.0), compare_runs(_run(wait_s=0.0), _run(wait_s=5.0), "old.json"), "new.json"
    )
    assert "2.00× the throughput of old.json; this run waited for data 0 % of the time against 50 %" in text
    (line,) = (line for line in text.splitlines() if "blocked for a batch, per batch" in line)
    assert line.split()[-5:] == ["0", "s", "500", "ms", "0.00×"]


def test_settings_that_differ_are_named_with_both_values() -> None:
    comparison = compare_runs(_run(num_workers=2), _run(num_workers=8), "other")
    assert comparison.settings == (Difference(setting="num_workers of Images", run="2", reference="8"),)


def test_what_makes_two_runs_not_comparable_is_said() -> None:
    here = dataclasses.replace(
        _run(),
        cpus=4,
        machine={"processor": "a", "memory_nbytes": 1 << 30},
        versions={"torch": "2.13", "python": "3.11"},
    )
    there = dataclasses.replace(
        _run(samples_factor=2),
        command=("other.py",),
        exit_code=1,
        error="ValueError: x",
        cpus=8,
        machine={"processor": "b", "memory_nbytes": 2 << 30},
        versions={"torch": "2.9", "python": "3.11"},
    )
    assert compare_runs(here, there, "there").caveats == (
        "different commands: train.py and other.py",
        "the other run ended early: ValueError: x",
        "different numbers of samples: 640 and 1 280",
        "different numbers of batches: 10 and 20",
        "different numbers of usable cores: 4 and 8",
        "different machines: processor a and b",
        "different machines: memory 1.0 GiB and 2.0 GiB",
        "different versions: torch 2.13 and 2.9",
    )


def test_a_run_without_samples_compares_to_nothing() -> None:
    run = summarize_run(made_runs.empty(), "this run")
    comparison = compare_runs(made_runs.empty(), made_runs.ordinary(), "other")
    assert comparison_text.verdict(run, comparison) == "There is nothing to compare: this run loaded no samples."
    assert all(row.ratio in ("0.00×", "–") for row in comparison_text.rows(run, comparison.reference))
