"""What NVML says of a run's GPUs reaches the panel, the report and run.json: through nvidia-ml-py, from a fake library.

The library is built from support/fake_nvml.c. Of torch the program itself replaces what tells of its GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from launch.programs import OnTerminal, penstock, script
from scripts import TESTS, written

pytest.importorskip("pynvml")
if shutil.which("gcc") is None:
    pytest.skip("no gcc to build a libnvidia-ml with", allow_module_level=True)

SECOND = "66616b65-6661-6b65-6661-6b6566616b31"
"""The UUID of the second GPU. It is the only one that CUDA_VISIBLE_DEVICES leaves to the program: torch's number 0."""

PROGRAM = f"""
    import os, sys, time, torch
    from torch.utils.data import DataLoader

    class Properties:
        uuid, total_memory = {SECOND!r}, 1 << 37

    kinds = ("allocated", "reserved")
    stats = {{f"{{kind}}_bytes.all.{{when}}": 1 << 30 for kind in kinds for when in ("current", "peak")}}
    torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
    torch.accelerator.device_count = torch.cuda.device_count = lambda: 1
    torch.accelerator.memory_stats = lambda index: stats
    torch.cuda.is_initialized = lambda: True
    torch.cuda.get_device_name = lambda index: "a GPU"
    torch.cuda.get_device_properties = lambda index: Properties
    for epoch in range(int(sys.argv[1])):
        for batch in DataLoader(torch.zeros(20, 4), batch_size=4):
            time.sleep(0.02)
        if epoch == 2 and "lost" in sys.argv:
            open("lost", "w").close()
        if os.path.exists("enough"):
            break
"""


@pytest.fixture(autouse=True, scope="module")
def _preloaded_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As `preloaded_python`, where the library is found: a process looks for libraries where it did at its start."""
    folder = tmp_path_factory.mktemp("nvml")
    source = TESTS / "fake_nvml.c"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", folder / "libnvidia-ml.so.1"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    with preloaded.serving(set(), environment=environment) as server, pytest.MonkeyPatch.context() as patch:
        preloaded.install(patch.setattr)
        patch.setenv(preloaded.SERVER, server)
        yield


@pytest.fixture(autouse=True)
def _gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "2")
    monkeypatch.setenv("FAKE_NVML_LOST", str(tmp_path / "lost"))


def moments(folder: Path) -> list[dict[str, Any]]:
    """Return the moments of the run at which the program used its GPU."""
    timeline = json.loads(written(folder).read_text())["timeline"]
    return [moment for moment in timeline if moment["device_nbytes"] is not None]


def test_the_utilization_is_shown_and_recorded(tmp_path: Path, on_terminal: OnTerminal) -> None:
    terminal = on_terminal("run", script(tmp_path, PROGRAM).name, "1000", columns=150)
    row = terminal.until(lambda screen: "busy" in screen.text()[-1]).text()[-1]
    (tmp_path / "enough").touch()
    assert "GPU 60 % busy" in row
    assert terminal.end()[1] == 0
    assert {moment["device_utilization"] for moment in moments(tmp_path)} == {0.6}


def test_a_gpu_that_is_lost_midway_ends_the_figures_and_not_the_run(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", script(tmp_path, PROGRAM).name, "20", "lost")
    assert run.returncode == 0, run.stderr
    assert "400 samples in 100 batches" in run.stderr
    assert "peak device memory: 1.0 GiB of 128.0 GiB" in run.stderr
    last = moments(tmp_path)[-1]
    assert (last["device_nbytes"], last["device_utilization"]) == (1 << 30, None)
