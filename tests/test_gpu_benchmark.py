"""`benchmarks.gpu` takes its road with parts that need no GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import device, films, fit, gpu, gpu_cases, gpu_tables, gpu_tests, plans
from benchmarks.gpu import Part
from benchmarks.row_file import RowFile
from benchmarks.table import fill_in_tables
from penstock import Sim

WAYS = gpu_cases.ways
WAY_NAMES = tuple(gpu_cases.Way.__dataclass_fields__)

_WRITES = "import sys; open(sys.argv[-1], 'w').write('{}'); print('a row'); print('done: 1')"
_PARTS = (
    Part(name="tests", command=("-c", "print('2 passed')"), limit_s=30),
    Part(name="rows", command=("-c", _WRITES), limit_s=30),
    Part(name="broken", command=("-c", "raise SystemExit('no such kernel')"), limit_s=30),
    Part(name="endless", command=("-c", "print('begun', flush=True); import time; time.sleep(600)"), limit_s=1),
    Part(name="late", command=("-c", "print('late')"), limit_s=900, least_s=600),
)


def _called(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(out), *words])
    return gpu.main(_PARTS)


def _states(out: Path) -> dict[str, Any]:
    return {name: one["state"] for name, one in json.loads((out / "gpu.json").read_text())["parts"].items()}


def test_each_part_ends_as_it_does_and_a_second_call_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _called(monkeypatch, tmp_path, "--minutes", "1") == 1
    out = capsys.readouterr().out
    assert _states(tmp_path) == {"tests": "done", "rows": "done", "broken": "failed", "endless": "out of time"}
    assert "rows: done, done: 1" in out
    assert "late: not begun" in out
    assert "gpu: 2 of 5 parts done; failed: broken" in out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.json", "log.txt", "rows.json"]
    assert "no such kernel" in (tmp_path / "log.txt").read_text()
    (tmp_path / "rows.json").unlink()
    assert _called(monkeypatch, tmp_path, "--minutes", "30") == 1
    assert _states(tmp_path)["late"] == "done"
    assert not (tmp_path / "rows.json").exists()  # what is done is not done again
    assert _called(monkeypatch, tmp_path, "--minutes", "1", "rows") == 1
    assert (tmp_path / "rows.json").exists()


def test_a_part_whose_package_is_missing_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    assert (
        gpu.main((Part(name="tests", command=("-m", "nothing"), limit_s=30, needs="a_module_that_is_not_there"),)) == 0
    )
    assert "tests: left out, there is no a_module_that_is_not_there here" in capsys.readouterr().out


# ── the dry run ─────────────────────────────────────────────────────────────────────────────────────────────────


def _ran(monkeypatch: pytest.MonkeyPatch, part: str, out: Path) -> dict[str, Any]:
    """Run a part as `benchmarks.gpu --tiny` calls it, in this process."""
    command = next(one.command for one in gpu.PARTS if one.name == part)
    module = importlib.import_module(command[1])
    file = out / f"{part}.json"
    monkeypatch.setattr(sys, "argv", [*command[1:], "--tiny", "--resume", "--json", str(file)])
    assert not module.main()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize(
    ("part", "rows"),
    [("link", "corruption"), ("link", "link"), ("steps", "steps"), ("plans", "models"), ("fit", "overhead")],
)
def test_every_part_runs_without_a_gpu_and_goes_on_with_the_rows_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, rows: str
) -> None:
    monkeypatch.setattr(fit, "BLOCK_ROUNDS", 2)
    first = _ran(monkeypatch, part, tmp_path)
    assert first["sizes"] == "tiny"
    assert first[rows]
    monkeypatch.setattr(device, "_steps", None)  # what is there is not measured again
    monkeypatch.setattr(device, "_link", None)
    monkeypatch.setattr(device, "_corruption", None)
    monkeypatch.setattr(fit, "_overhead", None)
    monkeypatch.setattr(plans, "row", None)
    assert _ran(monkeypatch, part, tmp_path)[rows] == first[rows]


def test_tests_that_have_passed_are_not_run_again(tmp_path: Path) -> None:
    def collected(names: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(nodeid=name) for name in names]

    def ended(recorder: gpu_tests.Recorder, name: str, when: str, outcome: str) -> None:
        is_bad, is_left_out = outcome == "failed", outcome == "skipped"
        recorder.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=name, when=when, outcome=outcome, failed=is_bad, skipped=is_left_out, duration=1,
                longreprtext="why",
            )
        )  # fmt: skip

    def file() -> RowFile:
        report = {"benchmark": "gpu_tests", "sizes": "full", "machine": {}, "tests": []}
        return RowFile(argparse.Namespace(json=tmp_path / "tests.json", resume=True), report)

    first = gpu_tests.Recorder(file())
    for name, setup, call, teardown in (
        ("a", "passed", "passed", "passed"), ("b", "skipped", None, "passed"), ("c", "passed", "passed", "failed"),
        ("d", "passed", "failed", "passed"), ("e", "failed", None, "passed"),
    ):  # fmt: skip
        ended(first, name, "setup", setup)
        if call:
            ended(first, name, "call", call)
        ended(first, name, "teardown", teardown)
    rows = json.loads((tmp_path / "tests.json").read_text())["tests"]
    assert [(row["test"], row["outcome"]) for row in rows] == [
        ("a", "passed"), ("b", "skipped"), ("c", "failed"), ("d", "failed"), ("e", "failed")
    ]  # fmt: skip
    left = collected("abcdef")
    gpu_tests.Recorder(file()).pytest_collection_modifyitems(left)
    assert [item.nodeid for item in left] == ["c", "d", "e", "f"]


def _report(rows: Path, **machine: str) -> RowFile:
    report = {"benchmark": "x", "sizes": "full", "machine": {"gpu": "one", **machine}, "rows": []}
    return RowFile(argparse.Namespace(json=rows, resume=True), report)


def test_rows_of_another_gpu_are_not_taken_over_and_those_of_another_day_are(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    _report(file, date="Monday").add("rows", {"name": "a"}, lambda: {"ms": 1})
    assert _report(file, date="Tuesday", system="a newer kernel").report["rows"] == [{"name": "a", "ms": 1}]
    assert _report(file, gpu="another").report["rows"] == []


def test_a_row_that_fails_says_so_and_is_tried_again_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    first = _report(tmp_path / "report.json")
    first.add("rows", {"name": "a"}, broken)
    first.add("rows", {"name": "b"}, lambda: {"ms": 1})
    assert capsys.readouterr().out == "a: RuntimeError: no such kernel\n"
    assert first.exit_code() == 1
    second = _report(tmp_path / "report.json")
    assert second.report["rows"] == [{"name": "b", "ms": 1}]
    assert second.exit_code() == 0


# ── the pages ───────────────────────────────────────────────────────────────────────────────────────────────────

GRID = [
    {
        "case": "text", "loader": "torch", "num_workers": 8, "pin_memory": pinned, "non_blocking": free, "ahead": False,
        "step_ms": 10.0 - pinned - free, "transfer_ms": 2.0 / (1 + pinned), "idle": 0.25, "host_nbytes": 1 << 30,
    }
    for pinned in (False, True) for free in (False, True)
]  # fmt: skip
MACHINE = {"gpu": "a GPU", "driver": "1", "cuda": "13", "torch": "2.11", "cores": 16, "date": "2026-01-01"}


def _results(folder: Path) -> Path:
    def put(part: str, benchmark: str, **rows: Any) -> None:
        report = {"benchmark": benchmark, "sizes": "quick", "machine": MACHINE, **rows}
        (folder / f"{part}.json").write_text(json.dumps(report))

    ended = {"state": "done", "exit_code": 0, "seconds": 61.0, "summary": "== 25 passed in 61 s ==", "failed": []}
    put("gpu", "gpu", parts={"tests": ended})
    live = {
        "case": "live",
        "loader": "infer",
        "num_workers": 0,
        "ahead": True,
        "latency_ms": 51.0,
        "latency_most_ms": 60.0,
    }
    put("cases", "gpu_cases", cases=[*GRID, {"case": "video", "lacks": "PIL"}, live])
    link = [{"mib": 64, "gb_per_s": {"slot": [49, 50, 51], "torch pinned": [50, 50, 50], "pageable": [9, 9, 9]}}]
    right = {"batches": 10_000, "wrong_elements": 0}
    put("link", "device", costs=[{"of": "register 1 MiB", "us": [3.0]}], link=link, steps=[], corruption=right)
    rates = {"resident": [100.0], "penstock, device=": [97.0]}
    step = {"name": "images", "step_ms": 12.0, "samples_per_s": rates}
    step |= {"of_plain": {"penstock, device=": [1.02]}}
    step |= {"first_batch_ms": {"resident": [0.0], "penstock, device=": [11.0]}}
    of_the_bound = {
        name: {"resident": [1.0], "penstock, device=": [0.97]} for name in ("of_the_bound", "of_the_bound_after_first")
    }
    put("steps", "device", steps=[{**step, **of_the_bound}])
    model = {"name": "MLP", "parameters": 67_000_000, "micro_batch": 16, "predicted": 3 << 30}
    ran = {"measured": 2 << 30, "error": 0.5, "budget": 4 << 30, "recommended_runs": True, "twice_runs": False}
    put("plans", "plans", models=[{**model, **ran}, {"name": "deep MLP", "failed": "Traceback ..."}])
    return folder


def test_every_section_says_so_where_there_is_no_result(tmp_path: Path) -> None:
    for name in gpu_tables.SECTIONS:
        text = gpu_tables.section(tmp_path, name)
        assert re.search(r"no real gpu has run|not measured|此处未测", text.lower()), name


def test_the_sentence_has_what_was_reached_and_what_was_missed(tmp_path: Path) -> None:
    said = gpu_tables.section(_results(tmp_path), "sentence")
    assert said.startswith("On a GPU, 2026-01-01: tests: 25 passed in 61 s; 0 wrong elements in 10000 batches; ")
    assert "copies from slots reach 1.00 (target 0.95, reached) of the link" in said
    assert "`device=` reaches 0.970 (target 0.98, MISSED)" in said
    assert "1.020 (target 0.99, reached) of a plain `.to`" in said
    assert "off by 50.0% at most (target 5 %, MISSED)" in said


def test_the_articles_claims_stand_beside_what_was_measured(tmp_path: Path) -> None:
    rows = gpu_tables.section(_results(tmp_path), "articles").splitlines()
    cells = {row.split(" | ")[0].strip("| "): [cell.strip(" |") for cell in row.split(" | ")[2:]] for row in rows}
    missing = "not measured here: run it"
    assert cells["`pin_memory=True`: transfers 40 % faster"] == [missing, "+100%", missing]
    assert cells["`non_blocking=True`: transfers 35 % faster"] == [missing, "+0%", missing]
    assert cells["both: training time 25 % shorter"] == [missing, "-20.0%", missing]
    assert cells["(the most that a faster transfer could save: its share of a step)"] == [missing, "20.0%", missing]


def test_the_tables_have_the_rows_of_the_results(tmp_path: Path) -> None:
    folder = _results(tmp_path)
    shown = {name: gpu_tables.section(folder, name) for name in gpu_tables.SECTIONS}
    assert "| 64 MiB | 50.0 (49.0 … 51.0) | 50.0 (50.0 … 50.0) | 9.0 (9.0 … 9.0) | 1.00 |" in shown["link"]
    assert "|  | penstock, device= | 97 (97 … 97) | 0.970 (0.970 … 0.970) |" in shown["steps"]
    assert "| MLP | 67.0 M | 16 | 3.0 GiB | 2.0 GiB | +50.0 % | yes | out of memory |" in shown["plans"]
    assert "| text | torch | 8 | `pin_memory` `non_blocking` | 1.00 | 8.00 | 25% | 1.0 GiB |" in shown["cases"]
    assert "| video | needs PIL |" in shown["cases"]
    assert "scores come after 51 ms, after 60 ms at most" in shown["cases"]
    assert "| tests | done | 61 s | 25 passed in 61 s |" in shown["parts"]
    assert "| register 1 MiB | 3.0 (3.0 … 3.0) |" in shown["costs"]
    assert "deep MLP" not in shown["plans"]


PAGES = [gpu.ROOT / "README.md", gpu.ROOT / "CHANGELOG.md", *sorted((gpu.ROOT / "docs").rglob("*.md"))]


def test_the_pages_are_what_the_committed_results_give() -> None:
    marked = [page for page in PAGES if "results/gpu " in page.read_text()]
    assert {"README.md", "gpu.md", "articles.md", "articles.zh.md", "prefetch.md"} < {page.name for page in marked}
    for page in marked:
        assert fill_in_tables(page.read_text(), page.parent) == page.read_text()


def test_only_what_the_results_fill_in_says_that_no_gpu_has_run_it(tmp_path: Path) -> None:
    said = re.compile(
        r"no\s+(real\s+)?GPU\s+has\s+run|not\s+(yet\s+|been\s+)?run\s+on\s+a\s+(real\s+)?GPU", re.IGNORECASE
    )
    results = _results(tmp_path)
    for page in PAGES:
        text = re.sub(r"(?<=<!-- bench: )\S*results/gpu ", f"{results} ", page.read_text())
        assert not said.search(fill_in_tables(text, page.parent) if str(results) in text else text), page


def test_the_log_keeps_the_end_and_results_are_few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "LOG_NBYTES", 40)
    for _ in range(3):
        _called(monkeypatch, tmp_path, "tests")
    assert (tmp_path / "log.txt").read_text().endswith("── tests ──\n2 passed\n\n")
    assert len((tmp_path / "log.txt").read_text()) == 40
    assert len({"gpu.json", "log.txt", *(f"{part.name}.json" for part in gpu.PARTS)}) <= 8


def test_costs_are_measured_of_registering_fences_and_lent_slots() -> None:
    rows = device.costs(Sim(), sizes_mib=(1,), laps=2)
    assert [(row["of"], len(row["us"])) for row in rows] == [
        ("register 1 MiB", 2), ("unregister 1 MiB", 2), ("fence, and one query", 100), ("slot lent and returned", 100)
    ]  # fmt: skip
    refused = {row["of"]: row["us"] for row in device.costs(Sim(pinnable_nbytes=0, has_fence=False), (1,), laps=1)}
    assert refused["unregister 1 MiB"] == refused["fence, and one query"] == []


@pytest.mark.parametrize("name", plans.TINY)
def test_a_plan_is_predicted_where_there_is_no_gpu(name: str) -> None:
    row = plans.row(*plans.TINY[name])
    assert row["predicted"] > 4 * row["parameters"]
    assert ("measured" in row) == torch.cuda.is_available()


def test_ten_models_have_up_to_seven_billion_parameters() -> None:
    with torch.device("meta"):
        counts = [sum(p.numel() for p in make().parameters()) for make, _ in plans.MODELS.values()]
    assert len(counts) == 10
    assert 6.5e9 < max(counts) < 7.5e9


@pytest.mark.parametrize(("name", "module"), [(name, module) for name, (_, module) in gpu_cases.CASES.items()])
def test_a_case_trains_on_batches_that_are_decoded(name: str, module: str, tmp_path: Path) -> None:
    pytest.importorskip(module)
    case = gpu_cases.CASES[name][0](tmp_path, tiny=True)
    ahead = gpu_cases.Way(loader="penstock", num_workers=0, ahead=True)
    row = gpu_cases.measure(case, ahead, rounds=1, bound_ms=1e-9)
    assert 0.99 < row["idle"] <= 1
    assert row["host_nbytes"] > 1 << 20
    assert "transfer_ms" not in row


def test_cameras_give_clips_without_pyav_and_infer_their_latency(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("PIL")
    monkeypatch.setattr(films, "find_spec", lambda name: None)
    case = gpu_cases.live_case(tmp_path, tiny=True)
    (film,) = tmp_path.iterdir()
    assert film.suffix == ".mjpeg"
    decoded = list(films.frames(film, 32))
    assert len(decoded) == 64
    assert len({tuple(frame.flatten().tolist()) for frame in decoded}) == 64
    clips = list(case.dataset)
    assert [clip.shape for clip in clips] == [(3, 2, 32, 32)] * 16
    assert torch.equal(clips[0], torch.stack(decoded[:2], 1))
    assert torch.equal(clips[15], torch.stack(decoded[60:62], 1))
    row = gpu_cases._latency(case, gpu_cases.Way(loader="infer", num_workers=0, ahead=True))
    assert row["clips"] == 4
    assert 0 < row["latency_ms"] <= row["latency_most_ms"]


def test_the_grid_is_written_row_by_row_and_says_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = gpu_cases.Case(dataset=torch.arange(16.0), batch_size=4, step=lambda batch: None)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_cases, "_resident_ms", lambda case: 0.0)
    monkeypatch.setitem(gpu_cases.CASES, "text", (lambda folder, *, tiny: numbers, "numpy"))
    monkeypatch.setitem(gpu_cases.CASES, "video", (gpu_cases.video_case, "a_module_that_is_not_there"))
    monkeypatch.setattr(gpu_cases, "ways", lambda workers: [w for w in WAYS(workers) if w.pin_memory == w.non_blocking])
    rows: list[dict[str, Any]] = []
    lengths: list[int] = []

    def run() -> None:
        names = ["text", "video"]
        gpu_cases.run(rows, lambda: lengths.append(len(rows)), tiny=True, rounds=0, workers=0, names=names)

    run()
    assert lengths == [1, 2, 3, 4, 5, 6]
    assert rows[-1] == {"case": "video", "lacks": "a_module_that_is_not_there"}
    assert {row["loader"] for row in rows[:-1]} == {"torch", "penstock"}
    first = rows.pop(2)
    run()  # goes on with the row that is missing, and looks again for what was lacking
    assert lengths[6:] == [5, 6]
    assert {name: rows[4][name] for name in WAY_NAMES} == {name: first[name] for name in WAY_NAMES}


def test_a_case_that_fails_is_written_and_the_next_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, *, tiny: bool) -> gpu_cases.Case:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu_cases.CASES, "images", (broken, "numpy"))
    monkeypatch.setitem(gpu_cases.CASES, "text", (broken, "a_module_that_is_not_there"))
    rows: list[dict[str, Any]] = []
    gpu_cases.run(rows, lambda: None, tiny=True, rounds=0, workers=0, names=["images", "text"])
    assert [row["case"] for row in rows] == ["images", "text"]
    assert rows[0]["failed"].splitlines()[-1] == "RuntimeError: no such kernel"


def test_the_grid_has_every_setting_of_torchs_and_one_more_of_ours() -> None:
    grid = gpu_cases.ways([0, 8])
    assert len(set(grid)) == len(grid) == 2 * (2 * 2 * 2 + 1)
    assert [way.num_workers for way in grid if way.ahead] == [0, 8]


def test_the_parts_are_programs_that_are_there() -> None:
    for part in gpu.PARTS:
        assert (gpu.ROOT / f"{part.command[1].replace('.', '/')}.py").exists()
