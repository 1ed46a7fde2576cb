"""Each format beside its usual reader: `python -m benchmarks.sources [--skilled] [--quick] [--json FILE]`.

The usual reader (`usual_readers`) in torch's DataLoader, and `penstock.open` in penstock's: the same files, batch size
and number of workers, whole epochs, interleaved, after one warm-up epoch. The files are in the page cache. The loop
reads one byte of every cache line of each batch. If penstock is less than 1.5 times as fast as the usual reader, the
ceiling is measured, too: plain processes that only make the samples.

With `--skilled` it is the readers of those who know a format well instead (`skilled_readers`), as far as they are
installed, each in a process of its own; and the CPU time of all processes beside the wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader as TorchLoader

import penstock
from benchmarks import usual_readers as usual
from benchmarks.benchmark_result import Result, Target, compare
from benchmarks.ceiling import ceiling
from benchmarks.epoch_timing import Consumer, EpochTiming, time_epoch
from benchmarks.fresh_process import forked
from benchmarks.interleaved import interleave
from benchmarks.machine_facts import facts
from benchmarks.served import PeerFailedError, served
from benchmarks.skilled_readers import READERS
from benchmarks.workloads import Workload

OURS = "penstock"
TIMES, OF_CEILING = 1.5, 0.9
SIDE = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One format, with its files."""

    name: str
    reader: str
    """A description of the usual reader."""

    samples: int
    batch_size: int
    usual: Callable[[int], Any]
    """Given a number of workers, torch's loader."""

    ours: Callable[[int], Any]
    source: Callable[[], Any] | None = None
    """Opens the source alone, for the ceiling; None for streams."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sources", description=__doc__.partition("\n")[0])
    parser.add_argument("--skilled", action="store_true", help="beside readers that use a format well")
    parser.add_argument("--quick", action="store_true", help="fewer samples and rounds")
    parser.add_argument("--formats", nargs="*", choices=sorted(CASES), help="only these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    console, started, results = Console(stderr=True), time.perf_counter(), []
    for name in arguments.formats or CASES:
        if name == "arrow" and not usual.has_hugging_face():
            console.print("arrow: left out, Hugging Face's datasets is not installed", style="dim")
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            case = CASES[name](Path(folder), 1 if arguments.quick else 4)
            rounds = 3 if arguments.quick else 5
            if arguments.skilled:
                skilled = partial(_measure_skilled, case, Path(folder), arguments.workers, rounds)
                found_here, notes = forked(skilled)
                console.print(*notes, sep="\n", style="dim", end="\n" if notes else "")
                results += found_here
            else:
                results.append(forked(partial(_measure, case, arguments.workers, rounds)))
        console.print(*map(_summarize, results[-2:]), sep="\n", style="dim")
        if arguments.json:
            found = {
                "benchmark": "skilled" if arguments.skilled else "sources",
                "quick": arguments.quick,
                "workers": arguments.workers,
                "machine": facts(),
                "results": [result.to_json() for result in results],
                "seconds": round(time.perf_counter() - started, 1),
            }
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    report = _print_skilled if arguments.skilled else _print
    report(results, arguments.workers, time.perf_counter() - started)


def _measure(case: Case, workers: int, rounds: int) -> Result:
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], EpochTiming]] = {
        OURS: partial(time_epoch, case.ours(workers), Consumer("touch")),
        case.reader: partial(time_epoch, case.usual(workers), Consumer("touch")),
    }
    interleave(runs, 1)
    ran = interleave(runs, rounds)
    figures = ran.figures(lambda one: case.samples / one.seconds)
    result = compare(case.name, case.name, "samples/s", figures, [Target(against=case.reader, at_least=TIMES)], [])
    if all(result.verdicts()) or case.source is None:
        return result
    runs.clear()
    with _ceiling(case, workers) as bound:
        ran = interleave({OURS: partial(time_epoch, case.ours(workers), Consumer("touch")), "ceiling": bound}, rounds)
    figures = {**figures, "ceiling": ran.figures(lambda one: case.samples / one.seconds)["ceiling"]}
    targets = [Target(against=case.reader, at_least=TIMES), Target(against="ceiling", at_least=OF_CEILING)]
    return compare(case.name, case.name, "samples/s", figures, targets, [])


def _measure_skilled(case: Case, folder: Path, workers: int, rounds: int) -> tuple[list[Result], list[str]]:
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


@contextmanager
def _ceiling(case: Case, workers: int) -> Iterator[Callable[[], EpochTiming]]:
    assert case.source is not None
    workload = Workload(
        name=case.name,
        dataset=case.source(),
        batch_size=case.batch_size,
        batches=-(-case.samples // case.batch_size),
    )
    with ceiling(workload, workers) as run:
        yield run


def _torch_loader(dataset: Any, batch_size: int, workers: int, **options: Any) -> Any:
    return TorchLoader(dataset, batch_size, num_workers=workers, persistent_workers=True, **options)


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
        reader="Pillow, as torchvision's ImageFolder, in torch's DataLoader",
        samples=count,
        batch_size=64,
        usual=lambda workers: _torch_loader(usual.PillowFolder(train, 224), 64, workers, shuffle=True),
        ours=lambda workers: _penstock_loader(penstock.open(train, size=224), 64, workers, shuffle=True),
        source=lambda: penstock.open(train, size=224),
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
        reader="an h5py dataset in torch's DataLoader",
        samples=count,
        batch_size=64,
        usual=lambda workers: _torch_loader(usual.H5(path, count), 64, workers, shuffle=True),
        ours=lambda workers: _penstock_loader(penstock.open(path), 64, workers, shuffle=True),
        source=lambda: penstock.open(path),
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
        reader="pyarrow's row groups in torch's DataLoader",
        samples=count,
        batch_size=64,
        usual=lambda workers: _torch_loader(usual.ParquetRows(path), 64, workers),
        ours=lambda workers: _penstock_loader(penstock.open(path), 64, workers, shuffle=True),
        source=lambda: penstock.open(path),
    )


def arrow(folder: Path, times: int) -> Case:
    """Pictures, as Hugging Face's datasets keeps them."""
    count = 2048 * times
    usual.save_hugging_face(folder / "train", _pictures(count))
    files = sorted((folder / "train").glob("*.arrow"))
    return Case(
        name="arrow",
        reader="Hugging Face datasets, as torch tensors, in torch's DataLoader",
        samples=count,
        batch_size=64,
        usual=lambda workers: _torch_loader(usual.hugging_face(folder / "train"), 64, workers, shuffle=True),
        ours=lambda workers: _penstock_loader(penstock.open(files), 64, workers, shuffle=True),
        source=lambda: penstock.open(files),
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
        reader="an lmdb dataset in torch's DataLoader",
        samples=count,
        batch_size=64,
        usual=lambda workers: _torch_loader(usual.Lmdb(path, count, shape), 64, workers, shuffle=True),
        ours=lambda workers: _penstock_loader(penstock.open(path).map(_ToArray(shape)), 64, workers, shuffle=True),
        source=lambda: penstock.open(path).map(_ToArray(shape)),
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
        reader="WebDataset in torch's DataLoader",
        samples=count,
        batch_size=64,
        usual=lambda workers: _torch_loader(usual.webdataset(pattern, ("npy", "cls")), 64, workers),
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
    described = {"vector": "float", "label": "int"}
    return Case(
        name="tfrecord",
        reader="the tfrecord package in torch's DataLoader",
        samples=count,
        batch_size=128,
        usual=lambda workers: _torch_loader(usual.tfrecords(path, described, dict), 128, workers),
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
        reader="json and a list of lines in torch's DataLoader",
        samples=count,
        batch_size=128,
        usual=lambda workers: _torch_loader(usual.JsonLines(path), 128, workers),
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
        reader="csv.DictReader in torch's DataLoader",
        samples=count,
        batch_size=128,
        usual=lambda workers: _torch_loader(usual.CsvRows(path), 128, workers),
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
        reader="np.memmap in torch's DataLoader",
        samples=count,
        batch_size=64,
        usual=lambda workers: _torch_loader(usual.Windows(path, 1024), 64, workers, shuffle=True),
        ours=lambda workers: _penstock_loader(source(), 64, workers, shuffle=True),
        source=source,
    )


def video(folder: Path, times: int) -> Case:
    """Clips of 16 frames of 160x120."""
    import av

    files = []
    for number in range(8):
        files.append(folder / f"{number}.mp4")
        draw = np.random.default_rng(number)
        with av.open(str(files[-1]), "w") as container:
            stream = container.add_stream("libx264", rate=25, options={"g": "25"})
            stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
            scene = draw.integers(0, 256, (15, 20, 3)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
            for frame in range(160):
                picture = np.roll(scene, frame, axis=1)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
    return Case(
        name="video",
        reader="PyAV, opened for each clip, in torch's DataLoader",
        samples=80,
        batch_size=8,
        usual=lambda workers: _torch_loader(usual.Clips(files, 10, 16), 8, workers, shuffle=True),
        ours=lambda workers: _penstock_loader(
            penstock.open(files, frames=16, fields=["video"]), 8, workers, shuffle=True
        ),
        source=lambda: penstock.open(files, frames=16, fields=["video"]),
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
    "video": video,
}


# ── report ──────────────────────────────────────────────────────────────────────────────────────────────────


def _summarize(result: Result) -> str:
    return f"{result.name}: " + ", ".join(
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) of {other}"
        for other, ratios in result.ratios.items()
    )


def _meets_target(result: Result) -> bool:
    return any(result.verdicts())


def _print(results: list[Result], workers: int, seconds: float) -> None:
    table = Table(title=f"samples/s with {workers} workers; ratios are the rounds' median (least … most)")
    for head in ("format", "penstock", "usual reader", "times", "of the ceiling"):
        table.add_column(head)
    for result in results:
        reader, times = next(iter(result.ratios.items()))
        bound = f"{statistics.median(result.ratios['ceiling']):.2f}" if "ceiling" in result.ratios else "–"
        table.add_row(
            result.name,
            f"{statistics.median(result.figures[OURS]):,.0f}",
            f"{statistics.median(result.figures[reader]):,.0f}  {reader}",
            f"{statistics.median(times):.2f} ({min(times):.2f} … {max(times):.2f})",
            bound,
        )
    Console(width=150).print(table)
    names = ", ".join(result.name for result in results if not _meets_target(result)) or "none"
    print(
        f"sources: {TIMES} times the usual reader or {OF_CEILING} of the ceiling in "
        f"{sum(map(_meets_target, results))} of {len(results)}, missed: {names}; {seconds:.0f} s"
    )


def _print_skilled(results: list[Result], workers: int, seconds: float) -> None:
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
