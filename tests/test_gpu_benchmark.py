"""`benchmarks.gpu` takes its road with parts that need no GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import chart, device, films, fit, gpu, gpu_cases, gpu_decoding, gpu_tables, gpu_tests, plans, ways
from benchmarks.gpu import Part
from benchmarks.row_file import UNFINISHED, RowFile
from benchmarks.table import fill_in_tables

_WRITES = "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{}'); print('a row')"


def _part(name: str, program: str, limit_s: float = 30, least_s: float = 0) -> Part:
    return Part(name=name, command=("-c", program), limit_s=limit_s, least_s=least_s, code=("benchmarks/row_file.py",))


_PARTS = (
    _part("tests", "print('2 passed')"),
    _part("rows", _WRITES),
    _part("broken", "raise SystemExit('no such kernel')"),
    _part("endless", "print('begun', flush=True); import time; time.sleep(600)", limit_s=1),
    _part("short", f"raise SystemExit({UNFINISHED})"),
    _part("late", "print('late')", limit_s=900, least_s=600),
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
    late = "out of time"
    assert _states(tmp_path) == {"tests": "done", "rows": "done", "broken": "failed", "endless": late, "short": late}
    assert re.search(r"rows: done after \d+ s\n", out)
    assert re.search(r"broken: failed after \d+ s; no such kernel", out)
    assert "late: not begun" in out
    assert "gpu: 2 of 6 parts done; failed: broken" in out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.json", "log.txt", "rows.json"]
    assert "no such kernel" in (tmp_path / "log.txt").read_text()
    (tmp_path / "rows.json").unlink()
    assert _called(monkeypatch, tmp_path, "--minutes", "30") == 1
    assert _states(tmp_path)["late"] == "done"
    assert not (tmp_path / "rows.json").exists()  # what is done is not done again
    monkeypatch.setattr(gpu, "code_of", lambda part: "other code")
    assert _called(monkeypatch, tmp_path, "--minutes", "1") == 1
    assert (tmp_path / "rows.json").exists()


def test_a_part_whose_package_is_missing_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    part = Part(name="tests", command=("-m", "nothing"), limit_s=30, needs="a_module_that_is_not_there")
    assert gpu.main((part,)) == 0
    assert "tests: left out after 0 s; a_module_that_is_not_there is not installed here" in capsys.readouterr().out


def test_the_code_of_a_part_is_its_files_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    part = Part(name="x", command=(), limit_s=1, code=("src", "one.py"))
    (tmp_path / "src").mkdir()
    found = []
    for name, text in (("one.py", "1"), ("src/two.py", "2"), ("src/two.py", "3"), ("other.py", "4")):
        (tmp_path / name).write_text(text)
        found.append(gpu.code_of(part))
    assert len(set(found)) == 3
    assert found[2] == found[3]


def test_parts_that_share_a_report_have_the_same_code() -> None:
    for file in {part.file for part in gpu.PARTS if part.file}:
        assert len({gpu.code_of(part) for part in gpu.PARTS if part.file == file}) == 1


def test_two_calls_of_six_minutes_are_enough() -> None:
    assert sum(part.limit_s for part in gpu.PARTS) <= 2 * 6 * 60


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
    [("host", ["batches", "instructions", "link"]), ("steps", ["steps"]), ("graph", ["graph"]),
     ("corruption", ["corruption"]), ("plan", ["models"]), ("fit", ["overhead"]), ("text", ["cases", "articles"])],
)  # fmt: skip
def test_every_part_runs_without_a_gpu_and_goes_on_with_the_rows_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, rows: list[str]
) -> None:
    monkeypatch.setattr(fit, "BLOCK_ROUNDS", 2)
    first = _ran(monkeypatch, part, tmp_path)
    assert first["sizes"] == "tiny"
    for name in ("_wrong", "_bandwidth", "_host_rounds", "_counted"):  # what is there is not measured again
        monkeypatch.setattr(device, name, lambda *arguments: None)
    monkeypatch.setattr(device._Loops, "begin", None)
    monkeypatch.setattr(fit, "_overhead", None)
    monkeypatch.setattr(plans, "row", None)
    monkeypatch.setattr(gpu_cases, "fed_by_turns", None)
    monkeypatch.setattr(gpu_cases, "settings", None)
    again = _ran(monkeypatch, part, tmp_path)
    for name in rows:
        assert first[name]
        assert again[name] == first[name]


@pytest.mark.parametrize("kind", ["_images", "_films"])
def test_decoding_is_measured_on_the_host_where_there_is_no_gpu(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("av")
    about: dict[str, Any] = {}
    found = getattr(gpu_decoding, kind)(tmp_path, True, about)(0)
    assert found[gpu_decoding.HOST] > 0
    assert not about


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
        return RowFile(_asked(tmp_path / "tests.json"), report)

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


def _asked(file: Path, code: str = "", until: float = math.inf) -> argparse.Namespace:
    return argparse.Namespace(json=file, resume=True, code=code, until=until)


def _report(rows: Path, code: str = "", until: float = math.inf, **machine: str) -> RowFile:
    report = {"benchmark": "x", "sizes": "full", "machine": {"gpu": "one", **machine}, "rows": []}
    return RowFile(_asked(rows, code, until), report)


def test_rows_of_another_gpu_or_other_code_are_not_taken_over_and_those_of_another_day_are(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    _report(file, date="Monday").add("rows", {"name": "a"}, lambda: {"ms": 1})
    assert _report(file, date="Tuesday", system="a newer kernel").report["rows"] == [{"name": "a", "ms": 1}]
    assert _report(file, gpu="another").report["rows"] == []
    assert _report(file, code="another").report["rows"] == []


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


def test_a_round_is_written_when_it_has_ended_and_a_second_call_adds_those_that_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "report.json"

    def interrupted(number: int) -> dict[str, Any]:
        if number == 1:
            raise KeyboardInterrupt
        return {"round": number}

    with pytest.raises(KeyboardInterrupt):
        _report(file).add_rounds("rows", {"name": "a"}, 3, lambda: interrupted)
    assert json.loads(file.read_text())["rows"] == [{"name": "a", "rounds": [{"round": 0}]}]
    second = _report(file)
    second.add_rounds("rows", {"name": "a"}, 3, lambda: lambda number: {"round": number}, lambda: {"end": 1})
    assert second.report["rows"] == [{"name": "a", "rounds": [{"round": number} for number in range(3)], "end": 1}]
    second.add_rounds("rows", {"name": "a"}, 3, lambda: pytest.fail("it is there"))
    assert second.exit_code() == 0


def test_where_time_is_over_what_is_missing_is_left_and_the_report_is_unfinished(tmp_path: Path) -> None:
    soon = time.monotonic() + 60
    report = _report(tmp_path / "report.json", until=soon)
    report.add_rounds("rows", {"name": "a"}, 3, lambda: lambda number: {"round": number}, share=1e-9)
    assert len(report.report["rows"][0]["rounds"]) == 1  # its share is over, and one round is better than none
    assert report.exit_code() == UNFINISHED
    late = _report(tmp_path / "late.json", until=time.monotonic())
    late.add_rounds("rows", {"name": "a"}, 3, lambda: pytest.fail("there is no time"))
    assert late.report["rows"] == []
    assert late.exit_code() == UNFINISHED


# ── the pages ───────────────────────────────────────────────────────────────────────────────────────────────────

MACHINE = {
    "gpu": "NVIDIA X", "driver": "1", "cuda": "13", "torch": "2.11", "python": "3.12", "cores": 16, "date": "2026-01-01"
}  # fmt: skip
TORCH, PINNED, AHEAD = (way.name for way in ways.BEST)


def _turns(**figures: tuple[float, float, float, float]) -> dict[str, Any]:
    """Return two rounds, of what lies there, of torch, of pinned slots, and of `device=`."""
    names = (ways.RESIDENT, TORCH, PINNED, AHEAD)
    one = {name: {figure: found[number] for figure, found in figures.items()} for number, name in enumerate(names)}
    return {"rounds": [one, one]}


def _results(folder: Path) -> Path:
    def put(part: str, benchmark: str, **rows: Any) -> None:
        report = {"benchmark": benchmark, "sizes": "full", "machine": MACHINE, **rows}
        (folder / f"{part}.json").write_text(json.dumps(report))

    ended = {"state": "done", "exit_code": 0, "seconds": 21.0, "code": "1", "words": "", "failed": []}
    put("gpu", "gpu", parts={"tests": ended, "fit": {**ended, "state": "failed", "words": "no such kernel"}})
    put("tests", "gpu_tests", tests=[{"test": name, "outcome": "passed", "seconds": 1} for name in "abc"])
    steps = _turns(step_ms=(4, 8, 5, 4.5), first_ms=(0, 9, 8, 7))
    counted = {AHEAD: {"nbytes": 1 << 20, "segments": 2, "copied_out": 3, "copy_wait_s": 2e-6}}
    graph = _turns(step_ms=(4, 8, 4, 4), first_ms=(0, 9, 8, 7), lead=(99, 3, 4, 5), lead_most=(120, 5, 6, 7))
    put(
        "device", "device",
        link=[{"mib": 64, "slot": [49, 50, 51], "torch pinned": [50, 50, 50]}],
        corruption=[{"way": way, "batches": 10_000, "wrong_elements": 0} for way in (PINNED, AHEAD)],
        calls=[{"of": "cuEventRecord", "us": [1.0, 1.5, 2.0]}],
        batches=[{"name": "clips", **_turns(cpu_us=(1, 100, 200, 150), wall_us=(1, 150, 300, 200))}],
        instructions=[{"load": "dict of three", "way": AHEAD, "batch": 1801, "least": 1700, "most": 1900, "iter": 20}],
        steps=[{"name": "clips", **steps, "counted": counted}],
        graph=[{"name": "clips", **graph, "counted": counted}, {"name": "broken", "failed": "Traceback ..."}],
    )  # fmt: skip
    plain, pinned, free = ({"step_ms": ms, "transfer_ms": copy} for ms, copy in ((10.0, 2.0), (9.0, 1.0), (10.0, 2.0)))
    settings = {"torch": plain, "torch, pin_memory": pinned, "torch, non_blocking": free, TORCH: pinned}
    put(
        "cases", "gpu_cases", workers=8, articles=[{"case": "text", "settings": settings}],
        cases=[{"case": case, "compiled": "no", **_turns(step_ms=(6, 9, 8, 7.5), first_ms=(0, 9, 8, 7))}
               for case in ("images", "text")],
        infer=[{"case": "live", "latency_ms": 51.0, "latency_most_ms": 60.0}],
        lacking=[{"case": "video", "lacks": "PIL"}],
    )  # fmt: skip
    put(
        "decoding", "gpu_decoding",
        decoding=[{"name": "images", "rounds": [{"host, 8 workers": 900.0, "GPU": 1800.0}], "mean": 0.5, "most": 9.0},
                  {"name": "films", "rounds": [{"host, 8 workers": 90.0}], "lacks": "ExtraError: no torchcodec"}],
    )  # fmt: skip
    model = {"name": "MLP", "parameters": 67_000_000, "micro_batch": 16, "predicted": 3 << 30}
    ran = {"measured": 2 << 30, "error": 0.5, "budget": 4 << 30, "recommended_runs": True, "twice_runs": False}
    put("plans", "plans", models=[{**model, **ran}, {"name": "deep MLP", "failed": "Traceback ..."}])
    put("plan", "plans", models=[{**model, **ran, "name": "GPT", "parameters": 7_000_000_000, "error": 0.01}])
    return folder


def test_every_section_says_so_where_there_is_no_result(tmp_path: Path) -> None:
    for name in gpu_tables.SECTIONS:
        text = gpu_tables.section(tmp_path, name)
        assert re.search(r"no gpu has run|not measured|此处未测", text.lower()), name


def test_the_sentence_has_what_was_reached_and_what_was_missed(tmp_path: Path) -> None:
    said = gpu_tables.section(_results(tmp_path), "sentence")
    assert said.startswith("On an NVIDIA X (2026-01-01): a step in a CUDA graph runs at ")
    assert "; steps whose kernels the host launches at 0.89 to 0.89 with `device=`; " in said
    found = gpu_tables.section(tmp_path, "targets")
    reached = found.count("| reached |")
    assert f"; {reached} of {reached + found.count('| MISSED |')} targets are reached ([all of it]" in said
    for row in (
        "from an epoch's first batch on | at least 0.98 | MISSED |",
        "in the worst of 4 loops it has 1.000 of the speed of a pinned loader, torch's or penstock's | at least 0.99",
        "1.20 times as fast with `device=` as with torch's best setting | at least 1.2 | reached |",
        "copies from a slot reach 1.00 of the link's bandwidth | at least 0.95 | reached |",
        "0 elements of 20 000 batches were wrong | 0 | reached |",
        "a `device=` batch of a dict of three takes 1801 instructions of the interpreter | at most 1800 | MISSED |",
        "0.75 times the CPU time of a pinned batch | at most 1 | reached |",
        "the plan of a model of 7.0 billion parameters is off by 1.0 % at most | at most 5 % | reached |",
    ):
        assert row in found
    state = gpu_tables.section(tmp_path, "state")
    assert state == "Penstock was tested and measured on an NVIDIA X (2026-01-01)."


def test_shorter_steps_have_no_target(tmp_path: Path) -> None:
    _results(tmp_path)
    report = json.loads((tmp_path / "device.json").read_text())
    for one in report["steps"][0]["rounds"]:
        for found in one.values():
            found["step_ms"] /= 2
    (tmp_path / "device.json").write_text(json.dumps(report))
    assert "of the speed of data that is on the GPU already" not in gpu_tables.section(tmp_path, "targets")


def test_the_articles_claims_stand_beside_what_was_measured(tmp_path: Path) -> None:
    rows = gpu_tables.section(_results(tmp_path), "articles").splitlines()
    cells = {row.split(" | ")[0].strip("| "): [cell.strip(" |") for cell in row.split(" | ")[2:]] for row in rows}
    missing = "not measured here: run it"

    def only_text(words: str) -> list[str]:
        return [missing, words, missing, missing]

    assert cells["`pin_memory=True`: transfers 40 % faster"] == only_text("+100%")
    assert cells["`non_blocking=True`: transfers 35 % faster"] == only_text("+0%")
    assert cells["both: training time 25 % shorter"] == only_text("-10.0%")
    assert cells["(no article: `device=` of penstock, training time)"] == only_text("-25.0%")
    assert cells["(the most that a faster transfer could save: its share of a step)"] == only_text("20.0%")
    assert cells["(the GPU's idle share without any of these)"] == only_text("40.0%")


def test_the_tables_have_the_rows_of_the_results(tmp_path: Path) -> None:
    folder = _results(tmp_path)
    shown = {name: gpu_tables.section(folder, name) for name in gpu_tables.SECTIONS}
    assert "| 64 MiB | 50.0 (49.0 … 51.0) | 50.0 (50.0 … 50.0) | 1.00 |" in shown["link"]
    assert "| clips, 4.0 ms | resident | 4.00 (4.00 … 4.00) | 1.000 (1.000 … 1.000) | 0.0 |  |" in shown["steps"]
    assert "|  | penstock, device= | 4.50 (4.50 … 4.50) | 0.889 (0.889 … 0.889) | 7.0 | 2 |" in shown["steps"]
    assert "| 5, 7 at most | 1.0 MiB in 2 segments | 3 |" in shown["graph"]
    assert "broken" not in shown["graph"]
    assert "| dict of three | penstock, device= | 1801 | 1700 … 1900 | 20 |" in shown["instructions"]
    assert "| clips | penstock, device= | 150 (150 … 150) | 200 (200 … 200) |" in shown["batches"]
    assert "| `cuEventRecord` | 1.50 (1.00 … 2.00) |" in shown["calls"]
    assert "| MLP | 67.0 M | 16 | 3.0 GiB | 2.0 GiB | +50.0 % | yes | out of memory |" in shown["plans"]
    assert "| GPT | 7 000.0 M |" in shown["plans"]
    assert "deep MLP" not in shown["plans"]
    assert "|  | penstock, device= | 7.50 (7.50 … 7.50) | 1.200 (1.200 … 1.200) | 20% | 7.0 |" in shown["cases"]
    assert "video was left out: PIL is not installed there." in shown["cases"]
    assert "scores come after 51 ms, after 60 ms at most" in shown["cases"]
    assert "| images | 900 (900 … 900) | 1800 (1800 … 1800) | 0.50 on average, 9 at most |" in shown["decoding"]
    assert "| films | 90 (90 … 90) | not measured | ExtraError: no torchcodec |" in shown["decoding"]
    assert "| tests | done | 21 s | 3 tests: 3 passed |" in shown["parts"]
    assert "| fit | failed | 21 s | no such kernel |" in shown["parts"]
    assert "| 0 elements of 20 000 batches were wrong | 0 | reached |" in shown["targets"]


def test_the_picture_of_the_steps_has_a_bar_for_each_way(tmp_path: Path) -> None:
    report = json.loads((_results(tmp_path) / "device.json").read_text())
    picture = chart.steps_picture(report)
    assert picture.count("<rect") == 4
    for words in (">clips<", ">data on the GPU<", ">torch, pinned<", ">penstock, device=<", ">4.50<"):
        assert words in picture
    if chart.STEPS_RESULTS.exists():
        assert chart.steps_picture(json.loads(chart.STEPS_RESULTS.read_text())) == chart.STEPS_PICTURE.read_text()


PAGES = [gpu.ROOT / "README.md", gpu.ROOT / "CHANGELOG.md", *sorted((gpu.ROOT / "docs").rglob("*.md"))]


def test_the_pages_are_what_the_committed_results_give() -> None:
    marked = [page for page in PAGES if "results/gpu " in page.read_text()]
    written = {"README.md", "gpu-figures.md", "articles.md", "articles.zh.md", "prefetch.md"}
    assert written < {page.name for page in marked}
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
    assert len({"gpu.json", "log.txt", *(f"{part.file or part.name}.json" for part in gpu.PARTS)}) <= 8


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
    loader = ways.AHEAD.open(case.dataset, batch_size=case.batch_size, num_workers=0)
    found = ways.timed(ways.fed(ways.AHEAD, loader), case.step, 2)
    assert found["step_ms"] > 0
    copies = ways.timed_copies(ways.TORCH, ways.TORCH.open(case.dataset, batch_size=case.batch_size), case.step, 2)
    assert copies["transfer_ms"] > 0


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
    row = gpu_cases.latency(case)
    assert row["clips"] == 4
    assert 0 < row["latency_ms"] <= row["latency_most_ms"]


def test_a_case_that_fails_or_lacks_a_package_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(folder: Path, *, tiny: bool) -> gpu_cases.Case:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu_cases.CASES, "images", (broken, "numpy"))
    monkeypatch.setitem(gpu_cases.CASES, "text", (broken, "a_module_that_is_not_there"))
    rows: dict[str, Any] = {name: [] for name in ("cases", "articles", "infer", "lacking")}
    file = RowFile(_asked(tmp_path / "cases.json"), {"benchmark": "x", "sizes": "tiny", "machine": {}, **rows})
    for name in ("images", "text"):
        gpu_cases.measure(file, name, tiny=True, workers=1)
    assert file.report["cases"][0]["failed"].splitlines()[-1] == "RuntimeError: no such kernel"
    assert file.report["lacking"] == [{"case": "text", "lacks": "a_module_that_is_not_there"}]
    assert file.exit_code() == 1


def test_the_parts_are_programs_that_are_there() -> None:
    for part in gpu.PARTS:
        assert (gpu.ROOT / f"{part.command[1].replace('.', '/')}.py").exists()
