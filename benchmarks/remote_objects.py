"""Small remote images, one object each: `python -m benchmarks.remote_objects [--quick] [--json FILE]`.

A server on this machine answers each request after 30 ms (HTTP) or 50 ms (S3, and S3 with a cache folder). JPEGs of
64 x 64 pixels are read as they are, by loaders with 2 workers and batches of 32, in an order that is drawn anew for
each epoch:

    penstock         `penstock.open(...)` in penstock's DataLoader, and in torch's
    one by one       torch's DataLoader, and fsspec's `cat_file` for each sample
    fsspec           the same, and fsspec's `cat` for each batch: all of its objects at once
    litdata          `StreamingRawDataset`, where it is installed

All loaders of a case are open at once, and take turns in rounds whose order is reversed from one to the next, after an
epoch each that warms them up. A ratio is taken within a round. "cold" is an epoch with an empty cache folder, "warm"
the next one with the same. Requests are those that the server answered in the epochs, for each image.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

import penstock
from benchmarks.benchmark_result import OURS, Result, Spread, Target, compare
from benchmarks.fresh_process import forked
from benchmarks.interleaved import interleave
from benchmarks.machine_facts import facts
from benchmarks.object_server import requests_since, serving
from benchmarks.process_tree_cpu import cpu_s
from benchmarks.table import terminal_table

WORKERS, BATCH_SIZE = 2, 32
HTTP_S, S3_S = 0.03, 0.05
IN_TORCH, ONE_BY_ONE, AT_ONCE, LITDATA = "penstock in torch", "one by one", "fsspec", "litdata"
_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}

Turn = dict[str, float]


class OneByOne(Dataset[bytes]):
    """Objects by fsspec, a request for each sample."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self.storage: Any = None

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> bytes:
        data: bytes = self._storage().cat_file(self.urls[index])
        return data

    def _storage(self) -> Any:
        if self.storage is None:  # in a worker: its event loop is not that of the parent
            import fsspec

            self.storage = fsspec.filesystem(self.urls[0].partition("://")[0], skip_instance_cache=True)
        return self.storage


class AtOnce(OneByOne):
    """Objects by fsspec, those of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        urls = [self.urls[index] for index in indices]
        names = [self._storage()._strip_protocol(url) for url in urls]
        found = self._storage().cat(urls)
        return [found[name] for name in names]


def _encoded(sample: dict[str, Any]) -> bytes:
    data: bytes = sample["encoded"]
    return data


def _as_list(samples: list[bytes]) -> list[bytes]:
    return samples


def images(count: int) -> dict[str, bytes]:
    """Return JPEGs of noise, by key."""
    found = {}
    for number in range(count):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)).save(file, "JPEG")
        found[f"train/{number:06d}.jpg"] = file.getvalue()
    return found


def _turn(server: str, expected: int, loader: Any) -> Turn:
    requests_since(server)
    cpu, start, nbytes = cpu_s(), time.perf_counter(), 0
    for batch in loader:
        nbytes += sum(map(len, batch))
    passed, used = time.perf_counter() - start, cpu_s() - cpu
    if nbytes != expected:
        raise RuntimeError(f"an epoch had {nbytes} bytes instead of {expected}")
    return {"seconds": passed, "cpu_s": used, "requests": requests_since(server)}


def _loader(kind: Any, dataset: Any) -> Any:
    shuffles = {"shuffle": True, "num_workers": WORKERS, "collate_fn": _as_list}
    return kind(dataset, BATCH_SIZE, persistent_workers=True, **shuffles)


def measure(objects: dict[str, bytes], server: str, folder: str, rounds: int) -> dict[str, list[Turn]]:
    """Return each reader's turns at a case without a cache."""
    urls = [f"{folder}/{key}" for key in objects]
    source = penstock.open(urls, format="images", fields=["encoded"]).map(_encoded)  # type: ignore[union-attr]
    loaders = {
        OURS: _loader(penstock.DataLoader, source),
        IN_TORCH: _loader(DataLoader, penstock.open(urls, format="images", fields=["encoded"]).map(_encoded)),  # type: ignore[union-attr]
        ONE_BY_ONE: _loader(DataLoader, OneByOne(urls)),
        AT_ONCE: _loader(DataLoader, AtOnce(urls)),
    }
    with tempfile.TemporaryDirectory() as scratch:
        if folder.startswith("s3") and importlib.util.find_spec("litdata"):
            loaders[LITDATA] = _loader(DataLoader, _litdata(f"{folder}/train", scratch))
        nbytes = sum(map(len, objects.values()))
        turns = {reader: partial(_turn, server, nbytes, loader) for reader, loader in loaders.items()}
        interleave(turns, 1)
        return interleave(turns, rounds).rounds


def measure_cached(objects: dict[str, bytes], server: str, folder: str, rounds: int) -> dict[str, list[Turn]]:
    """Return the turns with a cache folder: cold ones under the reader's name, warm ones with "warm"."""
    nbytes = sum(map(len, objects.values()))
    makers: dict[str, Callable[[str], Any]] = {OURS: partial(_cached, folder)}
    if importlib.util.find_spec("litdata"):
        makers[LITDATA] = partial(_litdata, f"{folder}/train", cache_files=True)
    found: dict[str, list[Turn]] = {f"{name}{suffix}": [] for name in makers for suffix in ("", " warm")}
    for number in range(rounds + 1):  # the first is the warm-up
        for name in [*makers][:: -1 if number % 2 else 1]:
            scratch = tempfile.mkdtemp()
            try:
                kind = penstock.DataLoader if name == OURS else DataLoader
                loader = _loader(kind, makers[name](scratch))
                cold, warm = _turn(server, nbytes, loader), _turn(server, nbytes, loader)
                del loader
            finally:
                shutil.rmtree(scratch)
            if number:
                found[name].append(cold)
                found[f"{name} warm"].append(warm)
    return found


def _cached(folder: str, scratch: str) -> Any:
    source = penstock.open(f"{folder}/train/", format="images", fields=["encoded"], cache=scratch)
    return source.map(_encoded)  # type: ignore[union-attr]


def _litdata(folder: str, scratch: str, **options: Any) -> Any:
    from litdata import StreamingRawDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the server has no TLS, and litdata no option for that
    return StreamingRawDataset(folder, cache_dir=scratch, **options)


def _results(case: str, turns: dict[str, list[Turn]], count: int, targets: list[Target]) -> list[Result]:
    kinds: list[tuple[str, str, Callable[[Turn], float], list[Target]]] = [
        ("speed", "images/s", lambda turn: count / turn["seconds"], targets),
        ("requests", "for an image", lambda turn: turn["requests"] / count, []),
        ("CPU time", "ms an image", lambda turn: turn["cpu_s"] / count * 1e3, []),
    ]
    found = []
    for name, unit, figure, wanted in kinds:
        figures = {reader: [figure(turn) for turn in each] for reader, each in turns.items()}
        if name == "requests" and not all(value for values in figures.values() for value in values):
            continue  # a ratio to no requests is none; the figures are in the JSON as turns
        found.append(compare(case, f"{case}: {name}", unit, figures, wanted, []))
    return found


@contextmanager
def _s3(server: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(_KEYS, AWS_ENDPOINT_URL=server, AWS_EC2_METADATA_DISABLED="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(count: int, rounds: int) -> tuple[list[Result], dict[str, Any]]:
    """Return the results of all cases, and every turn."""
    objects = images(count)
    found: list[Result] = []
    every: dict[str, Any] = {}
    at_once = [Target(against=ONE_BY_ONE, at_least=5.0)]
    with serving(objects, HTTP_S) as server:
        every["http, 30 ms"] = forked(partial(measure, objects, server, f"{server}/bucket", rounds))
        found += _results("http, 30 ms", every["http, 30 ms"], count, at_once)
    with serving(objects, S3_S) as server, _s3(server):
        every["s3, 50 ms"] = forked(partial(measure, objects, server, "s3://bucket", rounds))
        found += _results("s3, 50 ms", every["s3, 50 ms"], count, at_once)
        cached = forked(partial(measure_cached, objects, server, "s3://bucket", rounds))
    for suffix, name in (("", "cold"), (" warm", "warm")):
        case = f"s3, 50 ms, {name} cache"
        every[case] = {key: cached[f"{key}{suffix}"] for key in (OURS, LITDATA) if f"{key}{suffix}" in cached}
        found += _results(case, every[case], count, [])
    return found, every


def summary(results: list[Result]) -> str:
    """Return one line: penstock's speed at each case, and how many times the others' that is."""
    parts = []
    for result in results:
        if result.name.endswith("speed"):
            ratios = ", ".join(f"{Spread.of(each).median:.2f} x {name}" for name, each in result.ratios.items())
            mine = Spread.of(result.figures[OURS]).median
            parts.append(f"{result.case} {mine:.0f} images/s" + (f" ({ratios})" if ratios else ""))
    return "remote_objects: " + "; ".join(parts)


def main() -> None:
    """Measure all cases, and print the table and a line that sums it up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="320 images in 3 rounds instead of 1 280 in 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    asked = parser.parse_args()
    before = os.getloadavg()
    results, turns = run(320 if asked.quick else 1280, 3 if asked.quick else 5)
    if asked.json:
        report = {
            "benchmark": "remote_objects",
            "command": "python -m benchmarks.remote_objects" + (" --quick" if asked.quick else ""),
            "machine": facts(),
            "load": {"before": before, "after": os.getloadavg()},
            "results": [result.to_json() for result in results],
            "turns": turns,
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(terminal_table(results))
    print(summary(results))


if __name__ == "__main__":
    main()
