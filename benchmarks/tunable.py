"""Loops to tune, each with another bottleneck, on this machine's cores; those of the second group mostly wait."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import socketserver
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.epoch_timing import Consumer
from benchmarks.jpegs import jpeg_workload
from benchmarks.workloads import Copied, Integers, Pool, Slow
from penstock.tune.tuned_loop import TunedLoop

LENGTH = 1 << 17
_CACHE_NBYTES = 48 << 20


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop to tune, and the memory that it may take."""

    name: str
    tuned_loop: TunedLoop
    ram_nbytes: int | None = None
    waits: bool = False
    """Whether its samples wait, so that the grid has more workers than cores."""


class Hoarder(Dataset[Tensor]):
    """Each process that makes samples keeps a table of 48 MiB of its own, made with its first sample; 1 ms a sample."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.table: np.ndarray | None = None
        self.owner = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.table is None or self.owner != os.getpid():
            self.table, self.owner = np.ones(_CACHE_NBYTES, np.uint8), os.getpid()
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return torch.full((3, 32, 32), float(index))

    def __getstate__(self) -> dict[str, object]:
        return {"length": self.length, "table": None, "owner": 0}


class Distant(Dataset[Tensor]):
    """Samples from a remote storage: 2 ms of sleep each. How busy the machine is hardly matters to them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.002)
        return torch.full((3, 32, 32), float(index))


class Light(Dataset[Tensor]):
    """Samples of 0.1 ms."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        _compute(0.0001)
        return torch.full((3, 32, 32), float(index))


@dataclass
class Waiting(Dataset[Tensor]):
    """Samples that sleep, every `period`-th for another time, and compute."""

    sleep_s: float
    compute_s: float = 0.0
    slow_s: float = 0.0
    period: int = 20

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.slow_s if self.slow_s and index % self.period == 0 else self.sleep_s)
        if self.compute_s:
            _compute(self.compute_s)
        return torch.full((3, 32, 32), float(index))


@dataclass
class Remote(Dataset[Tensor]):
    """Samples from an HTTP server of this machine that takes its time."""

    address: str

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        with urllib.request.urlopen(f"{self.address}/{index}") as response:
            return torch.from_numpy(np.frombuffer(response.read(), np.uint8).copy())


@dataclass
class Locked(Dataset[Tensor]):
    """Samples that are read one at a time, whoever reads: 2 ms under a lock of the system."""

    path: str

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        with open(self.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.002)
        return torch.full((3, 32, 32), float(index))


class Zipped(Dataset[Tensor]):
    """Samples that C code unpacks without the GIL, about 1 ms each."""

    def __init__(self) -> None:
        self.packed = zlib.compress(np.random.default_rng(0).integers(0, 16, 3 * 128 * 128, np.uint8).tobytes() * 6)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.frombuffer(zlib.decompress(self.packed), np.uint8)[: 3 * 128 * 128].copy())


class Handwritten(Dataset[Tensor]):
    """Samples that Python code computes, about 2 ms each."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([sum((index + k) % 7 for k in range(20_000))])


@dataclass
class Served(Dataset[Tensor]):
    """Samples from a storage that serves as many readers at a time as there are `paths`, 8 ms each."""

    paths: list[str]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        with open(self.paths[index % len(self.paths)], "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.008)
        return torch.full((3, 32, 32), float(index))


class Jittery(Dataset[Tensor]):
    """Samples that wait, most of them 1 ms and some up to 40 ms: the latencies of an object store."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(min(0.04, 0.001 / (1e-3 + (index * 2654435761 % 1000) / 1000)))
        return torch.full((3, 32, 32), float(index))


class Fetched(Zipped):
    """Samples that wait for 10 ms and are then unpacked by C code, about 1 ms."""

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.01)
        return super().__getitem__(index)


class Sentences(Dataset[Tensor]):
    """Token ids of sentences, of 8 to 200 words."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(8 + index * 2654435761 % 193)


def padded(sentences: list[Tensor]) -> Tensor:
    """Return sentences as one tensor, padded with zeros; by a loop in Python, as people write it."""
    batch = torch.zeros(len(sentences), max(map(len, sentences)), dtype=torch.int64)
    for row, sentence in enumerate(sentences):
        batch[row, : len(sentence)] = sentence
    return batch


class Words(Dataset[Tensor]):
    """Lines of text that Python splits and looks up, about 0.3 ms each."""

    def __init__(self) -> None:
        self.vocabulary = {f"word{number}": number for number in range(5000)}
        self.line = " ".join(f"word{number * 7 % 5000}" for number in range(2000))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.vocabulary[word] for word in self.line.split()][:512])


class _Slow(BaseHTTPRequestHandler):
    """Answers after 10 ms."""

    def do_GET(self) -> None:
        time.sleep(0.01)
        self.send_response(200)
        self.send_header("Content-Length", "4096")
        self.end_headers()
        self.wfile.write(bytes(4096))

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 256


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@contextmanager
def _empty_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile() as file:
        yield file.name


def _serve(stack: ExitStack) -> str:
    """Start the server in a process of its own; return its address."""
    server: socketserver.BaseServer = _Server(("127.0.0.1", 0), _Slow)
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)
    host, port = server.server_address[:2]
    server.server_close()
    return f"http://{host!s}:{port}"


def loops(stack: ExitStack) -> Iterator[Loop]:
    """Yield the loops; what they need is closed with `stack`."""
    jpegs = stack.enter_context(jpeg_workload(batches=4000, batch_size=32))
    images = Pool((3, 128, 128), np.float32, LENGTH)
    touch = Consumer("touch")
    yield _loop("decode-bound", jpegs.dataset, 32, step_s=0.02)
    yield _loop("transport-bound", images, 64, step=touch)
    yield _loop("tiny", Integers(LENGTH), 128, step=lambda batch: None)
    yield _loop("slow samples", Slow(Copied(images), ordinary_s=0.0001, burn=False), 32, step_s=0.005)
    yield _loop("storage-bound", Distant(), 16, step_s=0.014)
    yield _loop("compute-bound", Light(), 32, step=_Compute())
    yield _loop("memory-capped", Hoarder(LENGTH), 16, step_s=0.004, ram_nbytes=150 << 20)
    yield _loop("sleep 5 ms", Waiting(0.005), 16, waits=True)
    yield _loop("sleep 50 ms", Waiting(0.05), 16, waits=True)
    yield _loop("sleep and compute", Waiting(0.004, 0.001), 16, waits=True)
    yield _loop("uneven waits", Waiting(0.002, slow_s=0.06), 16, step_s=0.002, waits=True)
    yield _loop("HTTP", Remote(_serve(stack)), 16, waits=True)
    yield _loop("behind a lock", Locked(stack.enter_context(_empty_file())), 16, waits=True)
    yield _loop("hidden waits", Waiting(0.005), 16, step_s=0.1, waits=True)
    yield _loop("zlib", Zipped(), 32)
    yield _loop("pure Python", Handwritten(), 16)
    yield _loop("TensorDataset", TensorDataset(torch.arange(LENGTH)), 64)
    yield _loop("large batches", Waiting(0.001), 512, step_s=0.02, waits=True)
    places = [stack.enter_context(_empty_file()) for _ in range(6)]
    yield _loop("six at a time", Served(places), 16, waits=True)
    yield _loop("jitter", Jittery(), 16, step_s=0.003, waits=True)
    yield _loop("fetch and unpack", Fetched(), 16, waits=True)
    yield _loop("padding", Sentences(), 256, step_s=0.002, collate_fn=padded)
    yield _loop("large samples", Pool((8, 512, 512), np.float32, LENGTH), 8, step=touch)
    yield _loop("words", Words(), 64, step_s=0.005)


class _Compute:
    """A step of about 50 ms on one core."""

    def __init__(self) -> None:
        self._weights = torch.randn(512, 512)

    def __call__(self, batch: Tensor) -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            self._weights @ self._weights


def _loop(
    name: str,
    dataset: Dataset[object],
    batch_size: int,
    *,
    step: Callable[[Tensor], object] | None = None,
    step_s: float = 0.0,
    ram_nbytes: int | None = None,
    waits: bool = False,
    collate_fn: Callable[[list[Tensor]], Tensor] | None = None,
) -> Loop:
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=collate_fn)
    tuned_loop = TunedLoop(loader=loader, step=step, step_s=step_s)
    return Loop(name=name, tuned_loop=tuned_loop, ram_nbytes=ram_nbytes, waits=waits)
