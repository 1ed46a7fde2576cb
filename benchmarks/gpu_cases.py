"""The programs of examples/ in a grid of settings: `python -m benchmarks.gpu_cases [--quick] [--json FILE [--resume]]`.

Four cases, each with real decoding: **images** (JPEG files, the ResNet-50 of examples/images.py, channels_last, AMP on
a GPU), **text** (windows of a token file, the GPT of examples/small_gpt.py, compiled on a GPU), **video** (training on
clips of a film, the 3-D CNN of examples/live_video.py) and **live** (the same network on the clips of cameras, its
scores back on the host; each worker has a camera). Films are decoded by PyAV; where it is missing, by Pillow, as
pictures of the Motion-JPEG that cameras give. A last row of **live** is `penstock.infer` at a camera of 25 frames a
second: how long a clip is on its way from its last frame to its scores, of which it waits 50 ms for others at most.
Each is fed by torch's DataLoader and by penstock's, with and
without workers, pin_memory and non_blocking, and by penstock with device=. Of each setting: the time of a batch's
transfer (with device= it is copied ahead, and the share of copies that were over when asked for is given instead), the
time of a step, the share of time in which the device waits (1 minus the step's time on a batch that lies there
already), and the host memory of all processes. A case whose packages are missing says so. Without a GPU it runs on the
CPU (for tests, with --tiny): then nothing is transferred.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from benchmarks.films import Cameras, Clips, write_film
from benchmarks.machine_facts import facts_with_gpu
from benchmarks.process_tree_memory import process_tree_memory
from benchmarks.row_file import RowFile, add_options
from penstock.core.tree import map_leaves

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


@dataclass(frozen=True, kw_only=True)
class Way:
    """One point of the grid."""

    loader: str
    num_workers: int
    pin_memory: bool = False
    non_blocking: bool = False
    ahead: bool = False


# ── the cases ───────────────────────────────────────────────────────────────────────────────────────────────


def images_case(folder: Path, *, tiny: bool) -> Case:
    """JPEG files in folders, one for each class."""
    import images
    from PIL import Image

    side, files, size = (32, 16, 4) if tiny else (224, 1024, 64)
    draw = np.random.default_rng(0)
    for number in range(files):
        path = folder / "images" / str(number % 4) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        coarse.resize((2 * side, 2 * side), Image.Resampling.BICUBIC).save(path, quality=90)
    model = images.make_model(4, 14 if tiny else 50).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: dict[str, Tensor]) -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = nn.functional.cross_entropy(model(images.as_floats(batch["image"])), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Case(
        dataset=penstock.open(folder / "images", size=side),
        batch_size=size,
        step=step,
    )


def text_case(folder: Path, *, tiny: bool) -> Case:
    """Windows of a token file."""
    import small_gpt
    import text_gpt

    length, size, depth = (16, 4, 1) if tiny else (256, 64, 8)
    text = folder / "text.txt"
    tokens = np.random.default_rng(0).integers(32, 127, (length // 2) * size * (5 if tiny else 60), dtype=np.uint8)
    text.write_bytes(tokens.tobytes())
    model = small_gpt.Gpt(depth).to(DEVICE)
    trained, compiled = _compiled(model, torch.zeros(size, length, dtype=torch.int64, device=DEVICE), small_gpt.loss_fn)
    step = penstock.TrainStep(
        trained, torch.optim.AdamW(model.parameters()), lambda model, batch: small_gpt.loss_fn(model, batch["tokens"])
    )
    source = penstock.open(text_gpt.write_tokens(text), length=length, step=length // 2, as_dtype="int64")
    return Case(dataset=source, batch_size=size, step=step, compiled=compiled)


def _compiled(model: nn.Module, batch: Tensor, loss_fn: Callable[..., Any]) -> tuple[Any, str | None]:
    """Return the model compiled, on a GPU, and whether it is: a machine may lack a compiler."""
    if DEVICE != "cuda":
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

    side, length, clips, size = (32, 2, 8, 2) if tiny else (112, 16, 256, 16)
    film = write_film(folder, length + 8, side)
    model = live_video.ClipNet(width=4 if tiny else 64).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return Case(dataset=Clips(film, clips, length, side), batch_size=size, step=step)


def live_case(folder: Path, *, tiny: bool) -> Case:
    """Clips of cameras, and the scores of their classes."""
    import live_video

    side, length, clips, size = (32, 2, 16, 2) if tiny else (112, 16, 512, 8)
    film = write_film(folder, 64, side)
    model = live_video.ClipNet(width=4 if tiny else 64).to(DEVICE).eval()

    def step(batch: Tensor) -> None:
        with torch.no_grad():
            model(batch).cpu()

    def camera() -> Iterator[Tensor]:
        for clip in Cameras(film, 4 if tiny else 64, length, side, every=1):
            time.sleep(0.0 if tiny else 1 / 25)
            yield clip

    return Case(dataset=Cameras(film, clips, length, side), batch_size=size, step=step, camera=camera, model=model)


CASES: dict[str, tuple[Callable[..., Case], str]] = {
    "images": (images_case, "PIL"),
    "text": (text_case, "numpy"),
    "video": (video_case, "PIL"),
    "live": (live_case, "PIL"),
}
"""Each with the module that it cannot do without."""


# ── the grid ────────────────────────────────────────────────────────────────────────────────────────────────


def ways(workers: Iterable[int]) -> list[Way]:
    """Return the points of the grid."""
    found = []
    for count in workers:
        for loader, pinned, non_blocking in itertools.product(("torch", "penstock"), (False, True), (False, True)):
            found.append(Way(loader=loader, num_workers=count, pin_memory=pinned, non_blocking=non_blocking))
        found.append(Way(loader="penstock", num_workers=count, ahead=True))
    return found


def _latency(case: Case, way: Way) -> dict[str, Any]:
    """Return a row of how long the clips of a camera are on their way to their scores, in milliseconds."""
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
    return {**asdict(way), "latency_ms": statistics.median(found), "latency_most_ms": max(found), "clips": len(found)}


def _epoch(case: Case, way: Way, loader: Any, most_batches: int | None = None) -> dict[str, float]:
    """Return the milliseconds of a step and of a transfer, and the most host memory that was seen."""
    marks: list[tuple[Any, Any]] = []
    settle()
    began, batches, most, aside_s = time.perf_counter(), 0, 0, 0.0
    for batch in itertools.islice(loader, most_batches):
        if not way.ahead:
            begin = _mark()
            batch = map_leaves(lambda leaf: moved(leaf, non_blocking=way.non_blocking), batch)
            marks.append((begin, _mark()))
        case.step(batch)
        batches += 1
        if batches == 2:  # what this takes is not the loop's
            looked = time.perf_counter()
            memory = process_tree_memory()
            most, aside_s = memory.pss_nbytes + memory.in_flight_nbytes, time.perf_counter() - looked
    settle()
    ms = (time.perf_counter() - began - aside_s) / batches * 1e3
    found = {"step_ms": ms, "host_nbytes": most}
    if marks:
        found["transfer_ms"] = statistics.median(_between_ms(*pair) for pair in marks)
    return found


def moved(leaf: Any, *, non_blocking: bool) -> Any:
    """Return a leaf of a batch on the device."""
    return leaf.to(DEVICE, non_blocking=non_blocking) if isinstance(leaf, Tensor) else leaf


def settle() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _mark() -> Any:
    if DEVICE != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


def _resident_ms(case: Case) -> float:
    """Return the milliseconds of a step on a batch that lies on the device already."""
    batch = next(iter(TorchDataLoader(case.dataset, case.batch_size)))
    batch = map_leaves(lambda leaf: moved(leaf, non_blocking=False), batch)
    laps = []
    for _ in range(12):
        settle()
        began = time.perf_counter()
        case.step(batch)
        settle()
        laps.append((time.perf_counter() - began) * 1e3)
    return statistics.median(laps[2:])


def measure(case: Case, way: Way, rounds: int, bound_ms: float) -> dict[str, Any]:
    """Return a row: the setting, and the median of rounds after some batches that warm up."""
    options: dict[str, Any] = {
        "batch_size": case.batch_size, "num_workers": way.num_workers, "persistent_workers": way.num_workers > 0,
        "drop_last": True,
    }  # fmt: skip
    if way.ahead:
        options["device"] = DEVICE
    elif DEVICE == "cuda":  # elsewhere it does nothing but warn
        options["pin_memory"] = way.pin_memory
    loader: Any = (TorchDataLoader if way.loader == "torch" else penstock.DataLoader)(case.dataset, **options)
    if rounds:
        _epoch(case, way, loader, 4)  # its workers persist, and so do its slots
    found = [_epoch(case, way, loader) for _ in range(max(1, rounds))]
    row: dict[str, Any] = {name: statistics.median(one[name] for one in found) for name in found[0]}
    if way.ahead and (counted := loader.statistics()).uploads:
        row["copies_hidden"] = counted.uploads_hidden / counted.uploads
    setting = {name: getattr(way, name) for name in Way.__dataclass_fields__}
    return {**setting, **row, "idle": max(0.0, 1 - bound_ms / row["step_ms"])}


def run(
    rows: list[dict[str, Any]],
    write: Callable[[], None],
    *,
    tiny: bool,
    rounds: int,
    workers: int,
    names: Iterable[str] = tuple(CASES),
) -> None:
    """Measure what can be measured here and `rows` lack, and write after each row."""
    rows[:] = [row for row in rows if "loader" in row]  # what was lacking is tried again
    for name in names:
        make, module = CASES[name]
        there = [{key: row[key] for key in Way.__dataclass_fields__} for row in rows if row["case"] == name]
        grid = ways(sorted({0, workers})) + [Way(loader="infer", num_workers=0, ahead=True)] * (name == "live")
        missing = [way for way in grid if asdict(way) not in there]
        if not missing:
            continue
        if find_spec(module) is None:
            rows.append({"case": name, "lacks": module})
            write()
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            try:
                case = make(Path(folder), tiny=tiny)
                bound_ms = _resident_ms(case)
                about = {"case": name, "resident_ms": bound_ms}
                if case.compiled is not None:
                    about["compiled"] = case.compiled
                for way in missing:
                    began = time.perf_counter()
                    row = _latency(case, way) if way.loader == "infer" else measure(case, way, rounds, bound_ms)
                    rows.append({**about, **row, "took_s": time.perf_counter() - began})
                    write()
            except Exception:  # noqa: BLE001
                rows.append({"case": name, "failed": traceback.format_exc()})  # the other cases are still worth it
                write()


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cases", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    parser.add_argument("--workers", type=int, default=8)
    add_options(parser)
    asked = parser.parse_args()
    sizes, workers = "tiny" if asked.tiny else "quick" if asked.quick else "full", 1 if asked.tiny else asked.workers
    found: dict[str, Any] = {"benchmark": "gpu_cases", "sizes": sizes, "machine": facts_with_gpu(), "cases": []}
    file = RowFile(asked, found)
    run(found["cases"], file.write, tiny=asked.tiny, rounds=3 if sizes == "full" else 1, workers=workers)
    for row in found["cases"]:
        print(
            ", ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
            )
        )
    lacking = [f"{row['case']} (no {row['lacks']})" for row in found["cases"] if "lacks" in row]
    failed = [row["case"] for row in found["cases"] if "failed" in row]
    measured = len(found["cases"]) - len(lacking) - len(failed)
    print(
        f"gpu_cases: {measured} rows; left out: {', '.join(lacking) or 'none'}; failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
