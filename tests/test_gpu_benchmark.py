"""`benchmarks.gpu` takes its road with parts that need no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part

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


def test_the_parts_are_programs_that_are_there() -> None:
    for part in gpu.PARTS:
        module = part.command[1]
        assert module == "pytest" or (gpu.ROOT / f"{module.replace('.', '/')}.py").exists()
