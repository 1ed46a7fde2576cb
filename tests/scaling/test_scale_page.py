"""The page on scale matches its results file and the formulas."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import costs_of
from benchmarks.scaling.fleet import Machines, Work, plan
from benchmarks.scaling.loop_configs import DATASET_LENGTH, LoopConfig
from benchmarks.scaling.measure import predict
from benchmarks.scaling.scenarios import GPUS, gpu_share, machines_of, scenarios
from benchmarks.scaling.tables import errors
from benchmarks.scaling.trainer import pace
from benchmarks.table import fill_in_tables

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results" / "scale-4core.json"


@pytest.fixture
def report() -> dict[str, Any]:
    """What was measured last."""
    if not RESULTS.exists():
        pytest.skip("nothing was measured yet: python -m benchmarks.scale --json benchmarks/results/scale-4core.json")
    return json.loads(RESULTS.read_text())


def test_the_tables_of_the_page_match_its_file(report: dict[str, Any]) -> None:
    page = PAGE.read_text()
    for name in ("check", "costs", "plans", "stages", "uneven"):
        assert f"<!-- bench: benchmarks/results/scale-4core.json {name} -->" in page
    assert fill_in_tables(page, ROOT) == page


@pytest.mark.usefixtures("report")
def test_a_figure_of_the_page_changed_by_hand_is_detected() -> None:
    page = PAGE.read_text()
    changed = page.replace("| 11 378 |", "| 11 379 |")
    assert changed != page
    assert fill_in_tables(changed, ROOT) == page


def test_the_page_has_no_measured_figure_outside_of_its_tables() -> None:
    """Prose is not regenerated when the benchmark runs again, so it may have no figure that would change."""
    prose = re.sub(r"<!-- bench: .*?<!-- bench:end -->", "", PAGE.read_text(), flags=re.DOTALL)
    assert "samples/s" not in prose
    assert not re.search(r"\d %", prose)


def test_the_plans_of_the_file_follow_from_its_costs(report: dict[str, Any]) -> None:
    costs = costs_of(report)
    machines = machines_of(costs)
    assert report["assumed"] == asdict(machines)
    for one, found in zip(scenarios(costs), report["scenarios"], strict=True):
        assert Work(**found["work"]) == one.work
        assert found["plans"] == [asdict(plan(one.work, machines, gpus)) for gpus in GPUS]


def test_the_predictions_of_the_file_follow_from_its_costs_alone(report: dict[str, Any]) -> None:
    costs = costs_of(report)
    for found in report["configs"]:
        config = LoopConfig(**found["config"])
        samples_s = config.samples_s(costs)
        prediction = pace(config.trainer(costs), sum(samples_s) / len(samples_s))
        assert (prediction.samples_per_s, prediction.bound) == (found["formula"], found["bound"])


def test_a_prediction_names_its_batches_and_they_are_in_the_dataset(report: dict[str, Any]) -> None:
    costs = costs_of(report)
    for found in report["configs"]:
        assert found["skip"] >= 2 * found["config"]["workers"]
        assert found["batches"] >= 1
        assert (found["skip"] + 1 + found["batches"]) * found["config"]["batch_size"] <= DATASET_LENGTH
    prediction = predict(LoopConfig(group="", workers=2, batch_size=8, sample_s=0.01), costs, seconds=2.0)
    assert prediction.simulated == pytest.approx(prediction.formula, rel=0.1)
    assert prediction.batches == pytest.approx(2.0 * prediction.formula / 8, abs=1)


def test_the_uneven_samples_of_the_file_are_reproducible(report: dict[str, Any]) -> None:
    machines = Machines(**report["assumed"])
    example = Work(**report["scenarios"][0]["work"])
    for row in report["uneven"]:
        if row["batch_size"] == 16:  # the quick ones
            work = replace(example, batch_size=16, step_s=example.step_s * 16 / example.batch_size)
            again = gpu_share(work, replace(machines, fill=row["fill"]), slow_share=0.01, slow_times=row["slow_times"])
            assert again == pytest.approx(row["gpu_share"])


def test_errors_compare_predictions_with_the_median_measurement() -> None:
    report = {"configs": [{"formula": 110.0, "simulated": 80.0, "samples_per_s": [90.0, 100.0, 400.0]}]}
    assert errors(report, "formula") == [pytest.approx(0.1)]
    assert errors(report, "simulated") == [pytest.approx(-0.2)]


@pytest.mark.parametrize("name", ["costs", "fleet", "scenarios", "simulation", "tables", "trainer"])
def test_the_examples_of_the_model_hold(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"benchmarks.scaling.{name}"))
    assert tried.attempted
    assert not tried.failed


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchmarks.scale", *words], cwd=ROOT, capture_output=True, text=True)


def test_figures_on_the_command_line_give_a_plan(tmp_path: Path) -> None:
    work = "--sample-ms 12 --sample-bytes 600000 --batch 256 --step-ms 180"
    machines = "--gpus 8 64 1024 --cores-per-machine 64 --gbit 25"
    done = run(*work.split(), *machines.split(), "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("scale: 8 GPUs: 3 CPU machines, next bottleneck: trainer's link")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [one["gpus"] for one in found["plans"]] == [8, 64, 1024]
    assert found["work"]["sample_s"] == 0.012
    assert found["machines"]["gbit"] == 25


def test_an_invalid_figure_is_refused_in_one_line() -> None:
    done = run("--fill", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "fill is a share of a machine's time, more than 0 and at most 1; it is 2.0"
    )


@pytest.mark.usefixtures("report")
def test_help_lists_which_figures_are_measured_and_which_are_assumed() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "what a trainer's link has for data (100, an assumption)" in text
    assert re.search(r"the loop's thread, for a batch \([\d.]+, measured\)", text)


@pytest.mark.usefixtures("report")
def test_the_page_can_be_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    text = PAGE.read_text()
    page.write_text(re.sub(r"( check -->\n).*?(<!-- bench:end -->)", r"\1old\n\2", text, count=1, flags=re.DOTALL))
    assert page.read_text() != text
    assert run("--page", str(page)).returncode == 0
    assert page.read_text() == text
