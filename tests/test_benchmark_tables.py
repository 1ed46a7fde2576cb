"""The pages' tables match the committed results, and every benchmark starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the package

from benchmarks import chart  # noqa: E402
from benchmarks.observe import ALONE, OBSERVED, OFTEN, LapTiming, share_of_alone  # noqa: E402
from benchmarks.table import fill_in_tables  # noqa: E402

PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_tables_of_the_pages_match_their_files() -> None:
    shown = set()
    for page in PAGES:
        if page.name == "scale.md":
            continue  # which has its own test
        text = page.read_text()
        shown |= set(re.findall(r"<!-- bench: \.\./benchmarks/results/(\S+)\.json", text))
        assert fill_in_tables(text, page.parent) == text, page
    wanted = {"fit-2core", "loader-4core", "sources-4core", "tune-4core", "everyday-2core"}
    assert wanted | {"articles-2core", "plan-peers-2core", "skilled-2core-quick"} <= shown


def test_a_figure_changed_by_hand_is_detected() -> None:
    for name, figure in {"benchmarks": "| 8.86 |", "data": "| 57.2 (", "workers": "| 0.941 ("}.items():
        page = (ROOT / f"docs/{name}.md").read_text()
        assert figure in page
        assert fill_in_tables(page.replace(figure, "| 9.99"), ROOT / "docs") == page


def test_the_chart_is_of_the_committed_results() -> None:
    reports = {name: json.loads(path.read_text()) for name, path in chart.RESULTS.items()}
    assert chart.picture(reports) == chart.PICTURE.read_text()


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(
    "name",
    [
        "articles",
        "device",
        "everyday",
        "fit",
        "fuzz",
        "loader",
        "observe",
        "remote_objects",
        "scale",
        "sources",
        "tune",
    ],
)
def test_a_benchmark_starts(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_the_cost_of_sampling_ten_times_as_often_counts_a_tenth() -> None:
    block = {
        ALONE: LapTiming(samples=100, seconds=1.0),
        OBSERVED: LapTiming(samples=99, seconds=1.0),
        OFTEN: LapTiming(samples=180, seconds=2.0),
    }
    for way in (OBSERVED, OFTEN):
        share = share_of_alone([block] * 5, way, "seconds")
        assert (share["share"], share["low"], share["median"]) == (0.99, 0.99, 0.99)


def test_a_rare_cost_that_the_median_hides_counts_in_full() -> None:
    quiet = {ALONE: LapTiming(samples=100, seconds=1.0), OBSERVED: LapTiming(samples=100, seconds=1.0)}
    dear = {ALONE: LapTiming(samples=100, seconds=1.0), OBSERVED: LapTiming(samples=80, seconds=1.0)}
    share = share_of_alone([quiet] * 9 + [dear], OBSERVED, "seconds")
    assert (share["share"], share["median"]) == (0.98, 1.0)
