"""`benchmarks.gpu` takes its road with parts that need no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device, gpu, gpu_cases, plans
from benchmarks.gpu import Part
from penstock import Sim

WAYS = gpu_cases.ways

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


def test_the_log_keeps_the_end_and_results_are_few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "LOG_NBYTES", 40)
    for _ in range(3):
        _called(monkeypatch, tmp_path, "tests")
    assert (tmp_path / "log.txt").read_text().endswith("── tests ──\n2 passed\n\n")
    assert len((tmp_path / "log.txt").read_text()) == 40
    assert len({"gpu.json", "log.txt", *(f"{part.name}.json" for part in gpu.PARTS if part.name != "tests")}) <= 8


def test_costs_are_measured_of_registering_fences_and_lent_slots() -> None:
    rows = device.costs(Sim(), sizes_mib=(1,), laps=2)
    assert [(row["of"], len(row["us"])) for row in rows] == [
        ("register 1 MiB", 2), ("unregister 1 MiB", 2), ("fence, and one query", 100), ("slot lent and returned", 100)
    ]  # fmt: skip
    refused = {row["of"]: row["us"] for row in device.costs(Sim(pinnable_nbytes=0, has_fence=False), (1,), laps=1)}
    assert refused["unregister 1 MiB"] == refused["fence, and one query"] == []


@pytest.mark.parametrize("name", plans.TINY)
def test_a_plan_is_predicted_where_there_is_no_gpu(name: str) -> None:
    row = plans.row(name, *plans.TINY[name])
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


def test_the_grid_is_written_row_by_row_and_says_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = gpu_cases.Case(dataset=torch.arange(16.0), batch_size=4, step=lambda batch: None)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_cases, "_resident_ms", lambda case: 0.0)
    monkeypatch.setitem(gpu_cases.CASES, "text", (lambda folder, *, tiny: numbers, "numpy"))
    monkeypatch.setitem(gpu_cases.CASES, "video", (gpu_cases.video_case, "a_module_that_is_not_there"))
    monkeypatch.setattr(gpu_cases, "ways", lambda workers: [w for w in WAYS(workers) if w.pin_memory == w.non_blocking])
    found: dict[str, Any] = {"cases": []}
    lengths: list[int] = []
    gpu_cases.run(
        found, lambda: lengths.append(len(found["cases"])), tiny=True, rounds=0, workers=0, names=["text", "video"]
    )
    assert lengths == [1, 2, 3, 4, 5, 6]
    assert found["cases"][-1] == {"case": "video", "lacks": "a_module_that_is_not_there"}
    assert {row["loader"] for row in found["cases"][:-1]} == {"torch", "penstock"}


def test_the_grid_has_every_setting_of_torchs_and_one_more_of_ours() -> None:
    grid = gpu_cases.ways([0, 8])
    assert len(set(grid)) == len(grid) == 2 * (2 * 2 * 2 + 1)
    assert [way.num_workers for way in grid if way.ahead] == [0, 8]


def test_the_parts_are_programs_that_are_there() -> None:
    for part in gpu.PARTS:
        module = part.command[1]
        assert module == "pytest" or (gpu.ROOT / f"{module.replace('.', '/')}.py").exists()
