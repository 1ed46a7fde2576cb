"""The pages' tables match the committed results, and every benchmark starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the package

from benchmarks import chart  # noqa: E402
from benchmarks.benchmark_result import compare  # noqa: E402
from benchmarks.loader import joined  # noqa: E402
from benchmarks.served import SampleSum  # noqa: E402
from benchmarks.table import fill_in_tables, markdown_table  # noqa: E402
from benchmarks.workloads import tokens  # noqa: E402

PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_tables_of_the_pages_match_their_files() -> None:
    shown = set()
    for page in PAGES:
        text = page.read_text()
        shown |= set(re.findall(r"<!-- bench: \.\./benchmarks/results/(\S+)\.json", text))
        assert fill_in_tables(text, page.parent) == text, page
    wanted = {"fit-2core", "loader-2core", "tune-4core", "everyday-2core"}
    assert wanted | {"articles-2core", "plan-peers-2core", "readers-2core"} <= shown


def test_a_figure_changed_by_hand_is_detected() -> None:
    for name, figure in {"benchmarks": "| 5.60 |", "reading-speed": "| 1.07 (", "workers": "| 0.941 ("}.items():
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
        "remote_objects",
        "run_cost",
        "tune",
    ],
)
def test_a_benchmark_starts(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_a_table_measured_in_pieces_has_every_row_once_with_all_its_rounds() -> None:
    def report(command: str, *rows: tuple[str, str, float]) -> dict[str, Any]:
        results = [
            compare(case, name, "samples/s", {"penstock": [4 * at], "torch": [at]}, [], []).to_json()
            for case, name, at in rows
        ]
        return {"command": command, "seconds": 1.0, "results": results, "absent": {}}

    before = report("a", ("slow", "asleep", 1.0), ("transport", "tokens", 2.0))
    both = joined(before, report("b", ("tiny", "integers", 3.0), ("transport", "tokens", 5.0)))
    assert [(row["name"], row["figures"]["torch"]) for row in both["results"]] == [
        ("tokens", [2.0, 5.0]),
        ("integers", [3.0]),
        ("asleep", [1.0]),
    ]
    assert both["results"][0]["ratios"] == {"torch": [4.0, 4.0]}
    assert (both["command"], both["seconds"]) == ("a; b", 2.0)


def test_a_table_of_peers_has_a_row_for_each_and_both_ratios() -> None:
    figures = {"penstock": [8.0, 8.0], "torch": [2.0, 4.0], "ideal": [10.0, 10.0]}
    wall = compare("slow", "asleep", "samples/s", figures, [], ["Grain failed: no answer in 90 s"])
    cpu = compare("slow", "asleep", "samples/CPU s", {"penstock": [6.0, 6.0], "torch": [2.0, 2.0]}, [], [])
    machine = {"cores": 2, "cpu": "one", "python": "3.11", "torch": "2", "date": "today", "litdata": "0.2"}
    report = {
        "benchmark": "loader",
        "machine": machine,
        "load": [1.0, 2.0, 3.0],
        "absent": {"FFCV": "not installed"},
        "results": [wall.to_json(), cpu.to_json()],
    }
    lines = markdown_table(report, "peers").splitlines()
    assert "| torch | 3.00 (2.00 … 4.00); 3.00 |" in lines
    assert "| ideal | 0.80 (0.80 … 0.80) |" in lines
    assert lines[-2:] == ["- asleep: Grain failed: no answer in 90 s", "- FFCV: not installed"]


def test_a_peer_that_gives_other_samples_is_found_and_one_with_another_order_is_not() -> None:
    workload = tokens(3, batch_size=2)
    rows = [workload.dataset[index] for index in range(workload.samples)]
    for order, is_right in (((0, 1, 2, 3, 4, 5), True), ((5, 1, 0, 2, 4, 3), True), ((0, 1, 2, 3, 4, 4), False)):
        found = SampleSum()
        for first in range(0, len(order), 2):
            found([{"batch": torch.stack([rows[index] for index in order[first : first + 2]])}])
        with nullcontext() if is_right else pytest.raises(ValueError, match="other samples than tokens"):
            found.check(workload)
