"""Decoding on the GPU beside the host: `python -m benchmarks.gpu_decoding [--tiny] [--json FILE [--resume]]`.

**images**: JPEG files of 448x448, decoded and resized to 224 by torchvision (nvJPEG), and by eight workers on the host,
whose batches come by `device=`. **films**: clips of 16 frames at 112, by torchcodec (NVDEC) and by the same workers
(PyAV). Each: how far the pixels are apart (0 to 255: mean, and most), and samples per second by turns. A row whose
packages are missing says which. Without a GPU (for tests, with --tiny) only the host decodes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
from benchmarks.films import write_film
from benchmarks.jpegs import write_class_folders
from benchmarks.machine_facts import facts_with_gpu
from benchmarks.row_file import RowFile, add_options
from benchmarks.ways import CUDA, PLACE, in_turns, settle

WORKERS = 8
HOST, GPU = "host, 8 workers", "GPU"


def main() -> int:
    """Measure, print, write; return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_decoding", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a test, with or without a GPU")
    add_options(parser)
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "benchmark": "gpu_decoding", "sizes": "tiny" if asked.tiny else "full", "machine": facts_with_gpu(),
        "decoding": [],
    }  # fmt: skip
    file = RowFile(asked, found)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for name, begin, share in (("images", _images, 0.5), ("films", _films, 1.0)):
            about: dict[str, Any] = {}

            def rounds(begin: Any = begin, about: dict[str, Any] = about) -> Callable[[int], dict[str, Any]]:
                found: Callable[[int], dict[str, Any]] = begin(Path(folder), asked.tiny, about)
                return found

            file.add_rounds("decoding", {"name": name}, 1 if asked.tiny else 3, rounds, about.copy, share)
    for row in found["decoding"]:
        print(row)
    return file.exit_code()


def _images(folder: Path, tiny: bool, about: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    files = write_class_folders(folder / "images", 16 if tiny else 256, 64 if tiny else 448, links=1 if tiny else 8)
    size = 32 if tiny else 224
    return _rounds(lambda **where: penstock.open(files, size=size, **where), "image", 4 if tiny else 64, tiny, about)


def _films(folder: Path, tiny: bool, about: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    side, frames = (32, 2) if tiny else (112, 16)
    films = folder / "films"
    for number in range(1 if tiny else 8):
        (films / str(number)).mkdir(parents=True)
        write_film(films / str(number), 8 if tiny else 160, side, "libx264")
    return _rounds(
        lambda **where: penstock.open(films, frames=frames, size=side, **where), "video", 2 if tiny else 8, tiny, about
    )


def _rounds(
    opened: Callable[..., Any], part: str, batch_size: int, tiny: bool, about: dict[str, Any]
) -> Callable[[int], dict[str, Any]]:
    """Compare the pixels, and return what measures samples per second."""
    host, workers = opened(), 1 if tiny else WORKERS
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": True}
    loaders = {HOST: penstock.DataLoader(host, device=PLACE, **options)}
    try:
        if CUDA:
            there = opened(device="cuda")
            about |= _apart(host, there, part, batch_size)
            loaders[GPU] = penstock.DataLoader(there, batch_size=batch_size)
    except Exception as error:  # noqa: BLE001
        about["lacks"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        traceback.print_exc()

    def rate(loader: Any) -> float:
        settle()
        began, samples = time.perf_counter(), 0
        for batch in loader:
            samples += len(batch[part])
        settle()
        return samples / (time.perf_counter() - began)

    feeds = {name: lambda loader=loader: rate(loader) for name, loader in loaders.items()}
    in_turns(feeds, 0)
    return lambda number: in_turns(feeds, number)


def _apart(host: Any, there: Any, part: str, batch_size: int) -> dict[str, float]:
    """Return how far the pixels of a batch are apart, of 255."""
    ours, theirs = (next(iter(penstock.DataLoader(one, batch_size=batch_size)))[part] for one in (there, host))
    difference = (ours.cpu().float() - theirs.float()).abs()
    return {"mean": difference.mean().item(), "most": difference.max().item()}


if __name__ == "__main__":
    sys.exit(main())
