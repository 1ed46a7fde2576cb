"""The programs of examples/, fed in several ways: `python -m benchmarks.gpu_cases [--cases ...] [--json FILE]`.

Four cases, each with real decoding: **images** (JPEG files, the ResNet-50 of examples/images.py, channels_last, AMP on
a GPU), **text** (windows of a token file, the GPT of examples/small_gpt.py, compiled on a GPU), **video** (training on
clips of a film, the 3-D CNN of examples/live_video.py) and **live** (the same network on the clips of cameras, its
scores back on the host; each worker has a camera). Films are decoded by PyAV; where it is missing, by Pillow, as
pictures of the Motion-JPEG that cameras give. A last row of **live** is `penstock.infer` at a camera of 25 frames a
second: how long a clip is on its way from its last frame to its scores, of which it waits 50 ms for others at most.

Each is fed with eight workers by turns, in epochs of 64 steps: by a batch that lies on the device already, by torch's
loader with `pin_memory=True` and `non_blocking=True`, by penstock's with the same, and with `device=`. Then one epoch
of torch's loader with each setting of the two that articles compare, in which every copy is timed too. A case whose
packages are missing says so. Without a GPU it runs on the CPU (for tests, with --tiny): then nothing is copied.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from benchmarks.films import Cameras, Clips, write_film
from benchmarks.machine_facts import facts_with_gpu
from benchmarks.row_file import RowFile, add_options
from benchmarks.ways import (
    BEST,
    CUDA,
    PLACE,
    RESIDENT,
    TORCH,
    TORCH_NON_BLOCKING,
    TORCH_PINS,
    TORCH_PLAIN,
    fed,
    in_turns,
    moved,
    repeated,
    timed,
    timed_copies,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
STEPS, ROUNDS, WORKERS = 64, 3, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset, and a step that trains on one of its batches."""

    dataset: Dataset[Any]
    batch_size: int
    step: Callable[[Any], object]
    camera: Callable[[], Iterable[Tensor]] | None = None
    """Clips as they arrive, for `infer` with the model, at bounded latency."""
    model: nn.Module | None = None
    compiled: str | None = None
    """Whether the model is compiled, or why it is not; None where nobody tries."""


# ── the cases ───────────────────────────────────────────────────────────────────────────────────────────────


def images_case(folder: Path, *, tiny: bool) -> Case:
    """JPEG files in folders, one for each class."""
    import images

    from benchmarks.jpegs import write_class_folders

    side, size = (32, 4) if tiny else (224, 64)
    files = write_class_folders(folder / "images", 16 if tiny else size * STEPS // 8, 2 * side, links=1 if tiny else 8)
    model = images.make_model(4, 14 if tiny else 50).to(PLACE)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: dict[str, Tensor]) -> None:
        with torch.autocast(PLACE, torch.bfloat16, enabled=CUDA):
            loss = nn.functional.cross_entropy(model(images.as_floats(batch["image"])), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Case(dataset=penstock.open(files, size=side), batch_size=size, step=step)


def text_case(folder: Path, *, tiny: bool) -> Case:
    """Windows of a token file."""
    import small_gpt
    import text_gpt

    length, size, depth, steps = (16, 4, 1, 4) if tiny else (256, 64, 8, STEPS)
    text = folder / "text.txt"
    tokens = np.random.default_rng(0).integers(32, 127, (length // 2) * (size * steps + 1), dtype=np.uint8)
    text.write_bytes(tokens.tobytes())
    model = small_gpt.Gpt(depth).to(PLACE)
    trained, compiled = _compiled(model, torch.zeros(size, length, dtype=torch.int64, device=PLACE), small_gpt.loss_fn)
    step = penstock.TrainStep(
        trained, torch.optim.AdamW(model.parameters()), lambda model, batch: small_gpt.loss_fn(model, batch["tokens"])
    )
    source = penstock.open(text_gpt.write_tokens(text), length=length, step=length // 2, as_dtype="int64")
    return Case(dataset=source, batch_size=size, step=step, compiled=compiled)


def _compiled(model: nn.Module, batch: Tensor, loss_fn: Callable[..., Any]) -> tuple[Any, str | None]:
    """Return the model compiled, on a GPU, and whether it is: a machine may lack a compiler."""
    if not CUDA:
        return model, None
    found = torch.compile(model)
    try:
        loss_fn(found, batch)[0].backward()
    except Exception as error:  # noqa: BLE001
        return model, f"no: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    finally:
        model.zero_grad()
    return found, "yes"


def video_case(folder: Path, *, tiny: bool) -> Case:
    """Clips of a film."""
    import live_video

    side, length, size = (32, 2, 2) if tiny else (112, 16, 16)
    film = write_film(folder, length + 8, side)
    model = live_video.ClipNet(width=4 if tiny else 64).to(PLACE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return Case(dataset=Clips(film, 8 if tiny else size * STEPS, length, side), batch_size=size, step=step)


def live_case(folder: Path, *, tiny: bool) -> Case:
    """Clips of cameras, and the scores of their classes."""
    import live_video

    side, length, size = (32, 2, 2) if tiny else (112, 16, 8)
    film = write_film(folder, 64, side)
    model = live_video.ClipNet(width=4 if tiny else 64).to(PLACE).eval()

    def step(batch: Tensor) -> None:
        with torch.no_grad():
            model(batch).cpu()

    def camera() -> Iterator[Tensor]:
        for clip in Cameras(film, 4 if tiny else 64, length, side, every=1):
            time.sleep(0.0 if tiny else 1 / 25)
            yield clip

    cameras = Cameras(film, 16 if tiny else size * STEPS, length, side)
    return Case(dataset=cameras, batch_size=size, step=step, camera=camera, model=model)


CASES: dict[str, tuple[Callable[..., Case], str]] = {
    "images": (images_case, "PIL"),
    "text": (text_case, "numpy"),
    "video": (video_case, "PIL"),
    "live": (live_case, "PIL"),
}
"""Each with the module that it cannot do without."""


# ── how they are fed ────────────────────────────────────────────────────────────────────────────────────────


def fed_by_turns(case: Case, workers: int, tiny: bool) -> Callable[[int], dict[str, Any]]:
    """Warm all up, and return what measures a round."""
    options = {"batch_size": case.batch_size, "num_workers": workers, "persistent_workers": True, "drop_last": True}
    resident = moved(next(iter(TorchDataLoader(case.dataset, case.batch_size))))
    feeds = {RESIDENT: repeated(resident, 2 if tiny else STEPS)}
    feeds |= {way.name: fed(way, way.open(case.dataset, **options)) for way in BEST}
    for feed in feeds.values():
        timed(feed, case.step, 8)
    return lambda number: in_turns({name: lambda f=feed: timed(f, case.step) for name, feed in feeds.items()}, number)


def settings(case: Case, workers: int) -> dict[str, Any]:
    """Return what torch's loader does with each setting of pin_memory and non_blocking."""
    options = {"batch_size": case.batch_size, "num_workers": workers, "persistent_workers": True, "drop_last": True}
    found = {}
    for way in (TORCH_PLAIN, TORCH_PINS, TORCH_NON_BLOCKING, TORCH):
        loader = way.open(case.dataset, **options)
        timed(fed(way, loader), case.step, 8)
        found[way.name] = timed_copies(way, loader, case.step)
    return {"settings": found}


def latency(case: Case) -> dict[str, Any]:
    """Return how long the clips of a camera are on their way to their scores, in milliseconds."""
    camera, model = case.camera, case.model
    assert camera is not None
    assert model is not None
    arrived: deque[float] = deque()

    def stamped() -> Iterator[Tensor]:
        for clip in camera():
            arrived.append(time.perf_counter())
            yield clip

    outputs = penstock.infer(model, stamped(), batch_size=case.batch_size, max_latency_s=0.05)
    found = [(time.perf_counter() - arrived.popleft()) * 1e3 for scores in outputs for _ in scores]
    return {"latency_ms": median(found), "latency_most_ms": max(found), "clips": len(found)}


def measure(file: RowFile, name: str, *, tiny: bool, workers: int) -> None:
    """Add the rows of a case that are missing."""
    make, module = CASES[name]
    if find_spec(module) is None:
        file.add("lacking", {"case": name}, lambda: {"lacks": module})
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        made: list[Case] = []

        def case() -> Case:
            if not made:
                made.append(make(Path(folder), tiny=tiny))
            return made[0]

        rows: dict[str, Any] = {"case": name}
        file.add_rounds(
            "cases", rows, 1 if tiny else ROUNDS, lambda: fed_by_turns(case(), workers, tiny),
            lambda: {"compiled": case().compiled}, share=0.75,
        )  # fmt: skip
        if file.has_time(5):
            file.add("articles", rows, lambda: settings(case(), workers))
        if name == "live" and file.has_time(5):
            file.add("infer", rows, lambda: latency(case()))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cases", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="only these")
    add_options(parser)
    asked = parser.parse_args()
    workers = 1 if asked.tiny else asked.workers
    found: dict[str, Any] = {
        "benchmark": "gpu_cases", "sizes": "tiny" if asked.tiny else "full", "workers": workers,
        "machine": facts_with_gpu(), "cases": [], "articles": [], "infer": [], "lacking": [],
    }  # fmt: skip
    file = RowFile(asked, found)
    for name in asked.cases:
        measure(file, name, tiny=asked.tiny, workers=workers)
    for rows in ("cases", "articles", "infer", "lacking"):
        for row in found[rows]:
            print(rows, row)
    return file.exit_code()


if __name__ == "__main__":
    sys.exit(main())
