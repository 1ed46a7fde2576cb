"""The programs that a user starts from run, on data as small as they can be."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import penstock

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = ("images", "text_gpt", "live_video", "records", "batch_inference", "ddp_resume")


def _run(folder: Path, *command: str, **environment: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _example(folder: Path, name: str, *arguments: str) -> str:
    return _run(folder, str(EXAMPLES / f"{name}.py"), *arguments)


def _write_images(folder: Path, count: int = 24) -> Path:
    """Write two classes of images: dark and bright ones."""
    rng = np.random.default_rng(0)
    for number in range(count):
        label = number % 2
        pixels = rng.integers(0, 100, (32, 32, 3)) + 150 * label
        file = folder / "images" / ("dark", "bright")[label] / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(file)
    return folder / "images"


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_shorter_than_80_lines(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


def test_images_are_trained_on_and_classified_with_the_saved_model(tmp_path: Path) -> None:
    images = _write_images(tmp_path)
    shown = _example(tmp_path, "images", "images", "--test", "images", "--epochs", "50", "--workers", "0", "--flip")
    assert "held-out accuracy 100.0%" in shown
    (images / "bright" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    shown = _example(tmp_path, "batch_inference", "images", "model.pt", "--workers", "1")
    assert re.search(r"^24 images in .* 1 left out: classes.csv$", shown, re.MULTILINE)
    with (tmp_path / "classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {Path(row["path"]).name for row in rows} == {path.name for path in images.rglob("0*.png")}
    assert all(row["class"] in row["path"] for row in rows)


def test_a_gpt_learns_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 400)
    options = ("--length", "16", "--depth", "1", "--compile", "eager")
    shown = _example(tmp_path, "text_gpt", "a.txt", "--prompt", "abca", *options)
    assert "149 windows of 16 tokens" in shown
    assert shown.splitlines()[-1].startswith("abcabcabcabc")


def test_the_clips_of_a_video_reach_the_model_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import av

    film = str(tmp_path / "film.mp4")
    with av.open(film, "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        for level in range(0, 240, 20):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), level, np.uint8), "rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    sizes = ("--side", "16", "--frames", "4", "--every", "2", "--batch-size", "3")
    shown = re.findall(r"clip \d+: class (\d+) \((.*)\)", _example(tmp_path, "live_video", film, *sizes))

    monkeypatch.syspath_prepend(EXAMPLES)
    live_video = importlib.import_module("live_video")
    torch.manual_seed(0)
    model = live_video.ClipNet().eval()
    clips = list(live_video.clips(live_video.frames(film, 16), 4, 2))
    assert [clip.shape for clip in clips] == [(3, 4, 16, 16)] * 5
    with torch.no_grad():
        likely = [model(clip[None]).softmax(1)[0].max(0) for clip in clips]
    assert [(int(name), float(share)) for name, share in shown] == [
        (int(one.indices), pytest.approx(one.values.item(), abs=2e-5)) for one in likely
    ]
    assert len({share for _, share in shown}) == 5


@pytest.mark.parametrize("name", ["train.h5", "train.tfrecord"])
def test_records_of_any_format_are_trained_on(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 4)).astype(np.float32)
    rows = [{"x": row.tolist(), "y": int(row[0] > 0)} for row in x]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    penstock.convert(tmp_path / "rows.jsonl", tmp_path / name, workers=0)
    shown = _example(
        tmp_path,
        "records",
        name,
        "--features",
        "x",
        "--label",
        "y",
        "--epochs",
        "8",
        "--workers",
        "1",
        "--batch-size",
        "8",
    )
    final = shown.splitlines()[-1]
    assert "of 96 samples" in final
    assert float(re.findall(r"accuracy ([\d.]+)%", final)[0]) > 80


def test_training_on_two_ranks_is_resumed_on_one(tmp_path: Path) -> None:
    _write_images(tmp_path, 32)
    options = ["images", "--global-batch", "8", "--workers", "0", "--epochs", "2"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    program = str(EXAMPLES / "ddp_resume.py")
    shown = _run(tmp_path, *torchrun, "2", program, *options, "--stop-after", "3", GLOO_SOCKET_IFNAME="lo")
    assert "epoch 0, step 3" in shown
    shown = _run(tmp_path, *torchrun, "1", program, *options, GLOO_SOCKET_IFNAME="lo")
    assert re.findall(r"epoch \d, step \d", shown) == ["epoch 0, step 4", "epoch 1, step 8"]


def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    (tmp_path / "cells.ipy").write_text("\n".join(map(textwrap.dedent, cells)))
    command = ("-m", "IPython", "--no-banner", "--colors=NoColor", "cells.ipy")
    shown = _run(tmp_path, *command, IPYTHONDIR=str(tmp_path / "ipython"))
    assert "128 samples, 128 different" in shown
    assert "8 steps, 0 out-of-memory" in shown
    assert re.search(r"Slow \(In\[1\]:\d+\): 128 samples in 8 batches", shown)
