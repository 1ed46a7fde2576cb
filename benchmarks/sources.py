"""Each format beside readers of those who know it well: `python -m benchmarks.sources [--quick] [--json FILE]`.

`penstock.open` in penstock's DataLoader, and the readers of `skilled_readers` that are installed, each in a process of
its own: the same files, batch size and number of workers, whole epochs, interleaved, after one warm-up epoch. Measured
are wall time and the CPU time of all processes. The files are in the page cache. The loop reads one byte of every cache
line of each batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import penstock
from benchmarks.benchmark_result import Result, compare
from benchmarks.epoch_timing import Consumer, EpochTiming, time_epoch
from benchmarks.fresh_process import forked
from benchmarks.interleaved import interleave
from benchmarks.machine_facts import facts
from benchmarks.served import PeerFailedError, served
from benchmarks.skilled_readers import READERS
from benchmarks.workloads import Workload

OURS = "penstock"
SIDE = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One format, with its files."""

    name: str
    samples: int
    batch_size: int
    ours: Callable[[int], Any]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sources", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples and rounds")
    parser.add_argument("--formats", nargs="*", choices=sorted(CASES), help="only these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    console, started, results = Console(stderr=True), time.perf_counter(), []
    for name in arguments.formats or CASES:
        if name == "arrow" and importlib.util.find_spec("datasets") is None:
            console.print("arrow: left out, Hugging Face's datasets is not installed", style="dim")
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            case = CASES[name](Path(folder), 1 if arguments.quick else 4)
            rounds = 3 if arguments.quick else 5
            found_here, notes = forked(partial(_measure, case, Path(folder), arguments.workers, rounds))
            console.print(*notes, sep="\n", style="dim", end="\n" if notes else "")
            results += found_here
        console.print(*map(_summarize, results[-2:]), sep="\n", style="dim")
        if arguments.json:
            found = {
                "benchmark": "skilled",
                "quick": arguments.quick,
                "workers": arguments.workers,
                "machine": facts(),
                "results": [result.to_json() for result in results],
                "seconds": round(time.perf_counter() - started, 1),
            }
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    _print(results, arguments.workers, time.perf_counter() - started)


def _measure(case: Case, folder: Path, workers: int, rounds: int) -> tuple[list[Result], list[str]]:
    """Return the figures in wall time and in CPU time, and what could not be measured."""
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], EpochTiming]] = {OURS: partial(time_epoch, case.ours(workers), Consumer("touch"))}
    notes = []
    with ExitStack() as stack:
        for reader in READERS:
            if reader.format != case.name:
                continue
            if why := reader.why_unavailable():
                notes.append(f"{case.name}: {reader.name} is left out: {why}")
                continue
            here = replace(reader, folder=folder, workers=workers)
            workload = Workload(name=case.name, dataset=[], batch_size=case.batch_size, batches=1)  # it has its files
            try:
                runs[reader.name] = stack.enter_context(served(here, workload, "touch"))
            except PeerFailedError as error:
                notes.append(f"{case.name}: {reader.name} did not start: {error}")
        warm_up = interleave(runs, 1)
        ran = interleave({name: runs[name] for name in warm_up.rounds}, rounds)
        runs.clear()
    if len(ran.rounds) == 1:
        return [], [*notes, *warm_up.notes]
    results = [
        compare(case.name, case.name, unit, ran.figures(figure), [], [])
        for unit, figure in (
            ("samples/s", lambda one: case.samples / one.seconds),
            ("samples/CPU s", lambda one: case.samples / one.tree_cpu_s),
        )
    ]
    return results, [*notes, *warm_up.notes, *ran.notes]


def _penstock_loader(source: Any, batch_size: int, workers: int, **options: Any) -> Any:
    return penstock.DataLoader(source, batch_size, num_workers=workers, persistent_workers=True, **options)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def _pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 32, (count, 3, SIDE, SIDE), dtype=np.uint8)


def images(folder: Path, times: int) -> Case:
    """JPEG files of 500x375 in class folders, to 224x224."""
    from benchmarks.jpegs import _write

    scenes = folder / "scenes"
    scenes.mkdir()
    made = [Path(path) for path in _write(scenes)]
    count = 384 * times
    for number in range(count):
        place = folder / "train" / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06}.jpg").write_bytes(made[number % len(made)].read_bytes())
    train = folder / "train"
    return Case(
        name="images",
        samples=count,
        batch_size=64,
        ours=lambda workers: _penstock_loader(penstock.open(train, size=224), 64, workers, shuffle=True),
    )


def _hdf5(folder: Path, times: int, name: str, samples: int, **storage: Any) -> Case:
    import h5py

    count = samples * times
    path = folder / "train.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("image", data=_pictures(count), **storage)
        file.create_dataset("label", data=np.arange(count))
    return Case(
        name=name,
        samples=count,
        batch_size=64,
        ours=lambda workers: _penstock_loader(penstock.open(path), 64, workers, shuffle=True),
    )


def parquet(folder: Path, times: int) -> Case:
    """Pictures as lists of bytes, in row groups of 256."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 512 * times
    pixels = 3 * SIDE * SIDE
    flat = pa.array(_pictures(count).reshape(-1))
    columns = {"image": pa.FixedSizeListArray.from_arrays(flat, pixels), "label": pa.array(np.arange(count))}
    path = folder / "train.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=256)
    return Case(
        name="parquet",
        samples=count,
        batch_size=64,
        ours=lambda workers: _penstock_loader(penstock.open(path), 64, workers, shuffle=True),
    )


def arrow(folder: Path, times: int) -> Case:
    """Pictures, as Hugging Face's datasets keeps them."""
    import datasets

    count = 2048 * times
    pictures = _pictures(count)
    features = datasets.Features(
        {"image": datasets.Array3D(pictures.shape[1:], "uint8"), "label": datasets.Value("int64")}
    )
    columns = {"image": list(pictures), "label": range(count)}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder / "train")
    files = sorted((folder / "train").glob("*.arrow"))
    return Case(
        name="arrow",
        samples=count,
        batch_size=64,
        ours=lambda workers: _penstock_loader(penstock.open(files), 64, workers, shuffle=True),
    )


def lmdb(folder: Path, times: int) -> Case:
    """Pictures as bytes."""
    import lmdb as package

    count = 4096 * times
    path = folder / "train.lmdb"
    pictures = _pictures(count)
    with package.open(str(path), map_size=pictures.nbytes * 2, subdir=False) as env, env.begin(write=True) as put:
        for number, picture in enumerate(pictures):
            put.put(b"%08d" % number, picture.tobytes())
    shape = pictures.shape[1:]
    return Case(
        name="lmdb",
        samples=count,
        batch_size=64,
        ours=lambda workers: _penstock_loader(penstock.open(path).map(_ToArray(shape)), 64, workers, shuffle=True),
    )


class _ToArray:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __call__(self, sample: dict[str, Any]) -> np.ndarray:
        return np.frombuffer(sample["value"], np.uint8).reshape(self._shape)


def tar(folder: Path, times: int) -> Case:
    """Pictures as .npy and labels, in eight shards."""
    import webdataset

    count = 2048 * times
    pictures = _pictures(count)
    for shard in range(8):
        with webdataset.TarWriter(str(folder / f"train-{shard}.tar")) as writer:
            for number in range(shard, count, 8):
                writer.write({"__key__": f"{number:06}", "npy": pictures[number], "cls": number})
    pattern = str(folder / "train-{0..7}.tar")
    return Case(
        name="tar",
        samples=count,
        batch_size=64,
        ours=lambda workers: _penstock_loader(penstock.open(pattern, fields=["npy", "cls"]), 64, workers),
    )


def tfrecord(folder: Path, times: int) -> Case:
    """Examples of 256 floats and a label."""
    from tfrecord.tools import tfrecord2idx
    from tfrecord.writer import TFRecordWriter

    count = 8192 * times
    path = folder / "train.tfrecord"
    vectors = np.random.default_rng(0).normal(size=(count, 256)).astype(np.float32)
    writer = TFRecordWriter(str(path))
    for number, vector in enumerate(vectors):
        writer.write({"vector": (vector, "float"), "label": (number, "int")})
    writer.close()
    tfrecord2idx.create_index(str(path), f"{path}.index")
    return Case(
        name="tfrecord",
        samples=count,
        batch_size=128,
        ours=lambda workers: _penstock_loader(penstock.open(path), 128, workers),
    )


def jsonl(folder: Path, times: int) -> Case:
    """Objects with a list of 32 numbers and a label."""
    count = 16384 * times
    path = folder / "train.jsonl"
    vectors = np.random.default_rng(0).normal(size=(count, 32)).round(6).tolist()
    with path.open("w") as file:
        for number, vector in enumerate(vectors):
            file.write(json.dumps({"vector": vector, "label": number}) + "\n")
    return Case(
        name="jsonl",
        samples=count,
        batch_size=128,
        ours=lambda workers: _penstock_loader(penstock.open(path), 128, workers),
    )


def csv(folder: Path, times: int) -> Case:
    """Rows of 16 numbers."""
    count = 32768 * times
    path = folder / "train.csv"
    table = np.random.default_rng(0).normal(size=(count, 16)).round(6)
    np.savetxt(path, table, "%.6f", delimiter=",", header=",".join(f"x{i}" for i in range(16)), comments="")
    return Case(
        name="csv",
        samples=count,
        batch_size=128,
        ours=lambda workers: _penstock_loader(penstock.open(path), 128, workers),
    )


def tokens(folder: Path, times: int) -> Case:
    """Windows of 1024 tokens of 16 bits."""
    count = 16384 * times
    path = folder / "train.bin"
    np.random.default_rng(0).integers(0, 50_000, count * 1024, dtype=np.uint16).tofile(path)
    source = partial(penstock.open, path, dtype="uint16", length=1024)
    return Case(
        name="tokens",
        samples=count,
        batch_size=64,
        ours=lambda workers: _penstock_loader(source(), 64, workers, shuffle=True),
    )


CASES: dict[str, Callable[[Path, int], Case]] = {
    "images": images,
    "hdf5 gzip": partial(_hdf5, name="hdf5 gzip", samples=1024, chunks=(64, 3, SIDE, SIDE), compression="gzip"),
    "hdf5 whole": partial(_hdf5, name="hdf5 whole", samples=4096),
    "parquet": parquet,
    "arrow": arrow,
    "lmdb": lmdb,
    "tar": tar,
    "tfrecord": tfrecord,
    "jsonl": jsonl,
    "csv": csv,
    "tokens": tokens,
}


# ── report ──────────────────────────────────────────────────────────────────────────────────────────────────


def _summarize(result: Result) -> str:
    return f"{result.name}: " + ", ".join(
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) of {other}"
        for other, ratios in result.ratios.items()
    )


def _print(results: list[Result], workers: int, seconds: float) -> None:
    table = Table(title=f"{workers} workers; ratios are the rounds' median (least … most)")
    for head in ("format", "penstock", "unit", "times", "beside"):
        table.add_column(head)
    medians = []
    for result in results:
        mine = f"{statistics.median(result.figures[OURS]):,.0f}"
        for other, ratios in result.ratios.items():
            medians.append(statistics.median(ratios))
            times = f"{medians[-1]:.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
            table.add_row(result.name, mine, result.unit, times, other)
    Console(width=150).print(table)
    print(
        f"sources: level with skilled readers or ahead in {sum(one >= 1 for one in medians)} of {len(medians)}, the "
        f"least {min(medians, default=1.0):.2f}; {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
