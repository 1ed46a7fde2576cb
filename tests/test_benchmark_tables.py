"""The README's tables match the committed results, and every benchmark starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the package

from benchmarks.observe import ALONE, OBSERVED, OFTEN, LapTiming, share_of_alone  # noqa: E402
from benchmarks.table import fill_in_tables, markdown_table  # noqa: E402


def test_the_tables_of_the_readme_match_their_files() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("fit", "loader", "sources", "tune"):
        assert f"<!-- bench: benchmarks/results/{name}-4core.json -->" in readme
    assert fill_in_tables(readme, ROOT) == readme


def test_the_table_of_everyday_loops_matches_its_file() -> None:
    page = (ROOT / "docs/everyday.md").read_text()
    assert "<!-- bench: ../benchmarks/results/everyday-2core.json -->" in page
    assert fill_in_tables(page, ROOT / "docs") == page


def test_a_figure_changed_by_hand_is_detected() -> None:
    readme = (ROOT / "README.md").read_text()
    for figure in ("| 8.86 |", "| 57.2 (", "| 0.941 ("):
        assert figure in readme
        assert fill_in_tables(readme.replace(figure, "| 9.99"), ROOT) == readme


def test_a_report_from_a_gpu_becomes_a_table() -> None:
    table = markdown_table(
        {
            "benchmark": "device",
            "quick": False,
            "date": "2026-01-01",
            "machine": {"gpu": "a GPU", "driver": "1", "cuda": "13", "torch": "2.11", "cores": 16},
            "link": [
                {"mib": 64, "gb_per_s": {"slot": [49, 50, 51], "torch pinned": [50, 50, 50], "pageable": [9, 9, 9]}}
            ],
            "steps": [
                {
                    "name": "images",
                    "step_ms": 12.0,
                    "samples_per_s": {"resident": [100.0], "penstock, device=": [99.0]},
                    "of_the_bound": {"resident": [1.0], "penstock, device=": [0.99]},
                }
            ],
            "corruption": {"batches": 100_000, "wrong_elements": 0},
        }
    )
    assert "| 64 MiB | 50.0 (49.0 … 51.0) | 50.0 (50.0 … 50.0) | 9.0 (9.0 … 9.0) | 1.00 |" in table
    assert "|  | penstock, device= | 99 (99 … 99) | 0.990 (0.990 … 0.990) |" in table
    assert "0 wrong elements in 100000 batches" in table


@pytest.mark.parametrize("name", ["device", "everyday", "fit", "fuzz", "loader", "observe", "scale", "sources", "tune"])
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
