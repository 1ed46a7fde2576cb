"""From host memory to the GPU: `python -m benchmarks.device [--parts ...] [--json FILE [--resume]]`.

- **host**: what a batch costs the thread that trains: CPU and wall time of `next` and `.to`, by turns, and each of the
  driver's calls that a copy needs.
- **link**: the bandwidth of copies from a slot and from memory that torch has pinned.
- **instructions**: those of Python's interpreter for a batch, which is exact, with two workers.
- **steps**: training steps by turns: on a batch that lies on the GPU already (the bound), on that batch while a loader
  runs whose batches nobody uses, fed by torch's pinned loader, by penstock's, and by `device=`. The first batch of an
  epoch, which nobody has made yet, is given apart.
- **graph**: the same with a step that is a CUDA graph. The host then runs far ahead: how far, and what that takes.
- **corruption**: batches that the user copies from pinned slots on four streams that lag behind, the views dropped at
  once, and batches of `device=`. Every byte is compared on the GPU.

With --tiny, for tests, it needs no GPU, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from benchmarks.instructions import count_instructions
from benchmarks.machine_facts import facts_with_gpu
from benchmarks.row_file import RowFile, add_options
from benchmarks.ways import (
    AHEAD,
    BEST,
    CUDA,
    PINNED,
    PLACE,
    PLAIN,
    RESIDENT,
    TORCH,
    Lead,
    Way,
    fed,
    in_turns,
    moved,
    repeated,
    settle,
    timed,
)
from benchmarks.workloads import Pool, Workload, clips, images, in_dicts, labelled_clips, tokens

PARTS = ("host", "link", "instructions", "steps", "graph", "corruption")
WORKERS, ROUNDS, STEPS = 8, 5, 200
UNUSED = "a loader that is not used"
Step = Callable[[Any], None]


def main() -> int:
    """Measure, print, write; return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a test, with or without a GPU")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="only these")
    add_options(parser)
    asked = parser.parse_args()
    if not CUDA and not asked.tiny:
        sys.exit("benchmarks.device needs an NVIDIA GPU, and there is none here")
    workers = 1 if asked.tiny else asked.workers
    found: dict[str, Any] = {
        "benchmark": "device", "sizes": "tiny" if asked.tiny else "full", "workers": workers,
        "machine": facts_with_gpu(), "instructions": [], "batches": [], "calls": [], "link": [], "steps": [],
        "graph": [], "corruption": [],
    }  # fmt: skip
    file = RowFile(asked, found)
    for part in PARTS:
        if part in asked.parts:
            MEASURE[part](file, workers, asked.tiny)
    for row in (row for rows in found.values() if isinstance(rows, list) for row in rows):
        print(", ".join(f"{name}={value}" for name, value in row.items() if not isinstance(value, list | dict)))
    return file.exit_code()


# ── what a batch costs the host ─────────────────────────────────────────────────────────────────────────────


def _host(file: RowFile, workers: int, tiny: bool) -> None:
    loads = TINY if tiny else {"clips": clips, "dict of three": in_dicts}
    for load, make in loads.items():
        file.add_rounds(
            "batches", {"name": load}, 1 if tiny else 3,
            lambda make=make: _host_rounds(make(8 if tiny else 100), workers), share=0.35,
        )  # fmt: skip
    for name in CALLS if CUDA else ():
        file.add("calls", {"of": name}, lambda name=name: _call_us(name, 2 if tiny else 20))


def _instructions(file: RowFile, workers: int, tiny: bool) -> None:
    for load, make in (TINY if tiny else COUNTED).items():
        for way in (TORCH, PLAIN, PINNED, AHEAD):
            about = {"load": load, "way": way.name}
            file.add("instructions", about, lambda make=make, way=way: _counted(make(10 if tiny else 20), way))


def _counted(workload: Workload, way: Way) -> dict[str, Any]:
    loader = way.open(workload.dataset, batch_size=workload.batch_size, num_workers=2, persistent_workers=True)
    return count_instructions(loader, way.moved)


def _host_rounds(workload: Workload, workers: int) -> Callable[[int], dict[str, Any]]:
    """Return what gives the medians of CPU and wall time of `next` and `.to`, in microseconds, beside a small step."""
    loaders = _opened(workload, workers)
    layers = [layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())]
    step, inputs = _training(nn.Sequential(*layers)), torch.zeros(64, 8, device=PLACE)

    def measured(way: Way, loader: Any) -> dict[str, float]:
        cpu, wall, batches, batch = [], [], iter(loader), None
        settle()
        while True:
            cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
            batch = next(batches, None)
            if batch is None:
                break
            batch = way.moved(batch)
            wall.append((time.perf_counter_ns() - began_ns) / 1e3)
            cpu.append((time.thread_time_ns() - cpu_ns) / 1e3)
            step(inputs)
        settle()
        return {"cpu_us": median(cpu[4:]), "wall_us": median(wall[4:])}

    feeds = {way.name: lambda way=way, loader=loader: measured(way, loader) for way, loader in loaders}
    in_turns(feeds, 0)
    return lambda number: in_turns(feeds, number)


def _opened(workload: Workload, workers: int) -> list[tuple[Way, Any]]:
    options = {"batch_size": workload.batch_size, "num_workers": workers, "persistent_workers": True}
    return [(way, way.open(workload.dataset, **options)) for way in BEST]


CALLS = (
    "nothing, by ctypes", "cuCtxGetCurrent", "cuStreamIsCapturing", "cuEventRecord", "cuEventQuery",
    "cuStreamWaitEvent", "cuCtxRecordEvent", "cuMemcpyHtoDAsync", "torch.empty_strided",
)  # fmt: skip


def _call_us(name: str, laps: int, calls: int = 50) -> dict[str, Any]:
    """Return the microseconds of one call, for each lap of `calls`, so few that the GPU's queue is never full."""
    driver = ctypes.CDLL("libcuda.so.1")
    event = torch.cuda.Event()
    event.record()
    stream, recorded = (ctypes.c_void_p(one) for one in (torch.cuda.current_stream().cuda_stream, event.cuda_event))
    context, status, nbytes = ctypes.c_void_p(), ctypes.c_int(), 1 << 20
    driver.cuCtxGetCurrent(ctypes.byref(context))
    host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    there = host.cuda()
    addresses = ctypes.c_uint64(there.data_ptr()), ctypes.c_void_p(host.data_ptr())
    run: dict[str, Callable[[], Any]] = {
        "nothing, by ctypes": partial(ctypes.CDLL(None).abs, 0),
        "cuCtxGetCurrent": partial(driver.cuCtxGetCurrent, ctypes.byref(context)),
        "cuStreamIsCapturing": partial(driver.cuStreamIsCapturing, stream, ctypes.byref(status)),
        "cuEventRecord": partial(driver.cuEventRecord, recorded, stream),
        "cuEventQuery": partial(driver.cuEventQuery, recorded),
        "cuStreamWaitEvent": partial(driver.cuStreamWaitEvent, stream, recorded, 0),
        "cuCtxRecordEvent": lambda: driver.cuCtxRecordEvent(context, recorded),
        "cuMemcpyHtoDAsync": lambda: driver.cuMemcpyHtoDAsync_v2(*addresses, ctypes.c_size_t(nbytes), stream),
        "torch.empty_strided": partial(
            torch.empty_strided, (16, 16, 3, 112, 112), (602112, 37632, 12544, 112, 1), dtype=torch.uint8, device="cuda"
        ),
    }
    call, found = run[name], []
    returned = call()
    for _ in range(laps + 1):
        settle()
        began = time.perf_counter_ns()
        for _ in range(calls):
            call()
        found.append((time.perf_counter_ns() - began) / 1e3 / calls)
    settle()
    return {"us": found[1:], "returned": returned if isinstance(returned, int) else 0}


# ── the link ────────────────────────────────────────────────────────────────────────────────────────────────


def _link(file: RowFile, workers: int, tiny: bool) -> None:
    for mib in (1,) if tiny else (4, 16, 64):
        file.add("link", {"mib": mib}, lambda mib=mib: _bandwidth(mib << 20, 2 if tiny else 8))


def _bandwidth(nbytes: int, laps: int) -> dict[str, Any]:
    """Return gigabytes a second of copies from a slot (a batch of one sample) and from torch's pinned memory."""
    loader = PINNED.open(Pool((nbytes,), np.uint8, 4), batch_size=1, num_workers=1)
    slot = next(iter(loader))[0]
    pinned = slot.clone().pin_memory() if CUDA else slot.clone()
    target = torch.empty_like(slot, device=PLACE)
    copies = max(2, (1 << 28) // nbytes)

    def rate(source: Tensor) -> float:
        settle()
        began = time.perf_counter()
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
        settle()
        return nbytes * copies / (time.perf_counter() - began) / 1e9

    rounds = [{"slot": rate(slot), "torch pinned": rate(pinned)} for _ in range(laps + 1)][1:]
    return {name: [one[name] for one in rounds] for name in ("slot", "torch pinned")} | {"is_pinned": slot.is_pinned()}


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────


def _convolutions() -> nn.Module:
    """Blocks of a ResNet's widths and depths."""

    def block(inside: int, outside: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        )

    widths = [64, 64, 64, 128, 128, 128, 256, 256, 256, 256, 512, 512, 512]
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width in widths:
        layers.append(block(inside, width, 1 if width == inside else 2))
        inside = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class _Transformer(nn.Module):
    """Four layers over sequences of 2048 tokens, of which a sixteenth is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(512, 1000)

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.embedding(batch[:, :128] % 32_000)).mean(1))
        return found


def _volumes() -> nn.Module:
    """A small 3-D CNN."""
    return nn.Sequential(
        nn.Conv3d(3, 32, 3, (1, 2, 2), 1), nn.ReLU(inplace=True),
        nn.Conv3d(32, 64, 3, 2, 1), nn.ReLU(inplace=True),
        nn.Conv3d(64, 128, 3, 2, 1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 400),
    )  # fmt: skip


def _training(model: nn.Module, prepare: Callable[[Any], Tensor] = lambda batch: batch) -> Step:
    model = model.to(PLACE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(batch: Any) -> None:
        with torch.autocast(PLACE, torch.bfloat16):
            loss = model(prepare(batch)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _frames_first(batch: Tensor) -> Tensor:
    return batch.float().div_(255).transpose(1, 2)


def _tiny(batches: int) -> Workload:
    return Workload(name="rows", dataset=Pool((16,), np.float32, 4 * batches), batch_size=4, batches=batches)


COUNTED: dict[str, Callable[[int], Workload]] = {
    "clips": clips, "clips and labels": labelled_clips, "dict of three": in_dicts
}  # fmt: skip
TINY: dict[str, Callable[[int], Workload]] = {"rows": _tiny}
LOOPS: dict[str, tuple[Callable[[int], Workload], Callable[[], Step]]] = {
    "clips": (clips, lambda: _training(_volumes(), _frames_first)),
    "dict of three": (in_dicts, lambda: _training(_convolutions(), lambda batch: batch["image"].float().div_(255))),
    "tokens": (tokens, lambda: _training(_Transformer())),
    "images": (lambda batches: images(batches, 32), lambda: _training(_convolutions())),
}
"""Workloads by their name, with a model that trains on them in steps of some milliseconds."""

TINY_LOOPS: dict[str, tuple[Callable[[int], Workload], Callable[[], Step]]] = {
    "rows": (_tiny, lambda: _training(nn.Linear(16, 8)))
}


def _steps(file: RowFile, workers: int, tiny: bool) -> None:
    loops = TINY_LOOPS if tiny else LOOPS
    for number, (name, (workload_of, step_of)) in enumerate(loops.items()):
        loops_ = _Loops(workers)
        file.add_rounds(
            "steps", {"name": name}, 1 if tiny else ROUNDS,
            lambda loops_=loops_, w=workload_of, s=step_of: loops_.begin(w(8 if tiny else STEPS), s(), unused=True),
            loops_.counted, share=1 / (len(loops) - number),
        )  # fmt: skip


def _graph(file: RowFile, workers: int, tiny: bool) -> None:
    name, (workload_of, step_of) = next(iter((TINY_LOOPS if tiny else LOOPS).items()))
    loops = _Loops(workers)

    def begin() -> Callable[[int], dict[str, Any]]:
        workload = workload_of(8 if tiny else STEPS)
        step = _captured(step_of(), _first_batch(workload)) if CUDA else step_of()
        return loops.begin(workload, step, leads=True)

    file.add_rounds("graph", {"name": name}, 1 if tiny else 3, begin, loops.counted)


def _captured(step: Step, batch: Tensor) -> Step:
    """Return the step as a CUDA graph, with a copy of its batch to where the graph reads it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(batch)

    def replayed(other: Tensor) -> None:
        batch.copy_(other, non_blocking=True)
        graph.replay()

    return replayed


def _first_batch(workload: Workload) -> Any:
    return moved(default_collate([workload.dataset[index] for index in range(workload.batch_size)]))


class _Loops:
    """The loops over one workload, whose loaders are made once and take turns."""

    def __init__(self, workers: int) -> None:
        self._workers, self._loaders = workers, list[tuple[Way, Any]]()

    def begin(
        self, workload: Workload, step: Step, *, unused: bool = False, leads: bool = False
    ) -> Callable[[int], dict[str, Any]]:
        """Open the loaders, warm all up, and return what measures a round."""
        self._loaders = _opened(workload, self._workers)
        resident = _first_batch(workload)
        feeds: dict[str, Callable[[], Iterator[Any]]] = {RESIDENT: repeated(resident, workload.batches)}
        if unused:
            options = {"batch_size": workload.batch_size, "num_workers": self._workers, "persistent_workers": True}
            plain = PLAIN.open(workload.dataset, **options)
            feeds[UNUSED] = lambda: (resident for _ in plain)
        feeds |= {way.name: fed(way, loader) for way, loader in self._loaders}
        for feed in feeds.values():
            timed(feed, step, 40)

        def run(feed: Callable[[], Iterator[Any]]) -> dict[str, float]:
            lead = Lead() if leads else None
            found = timed(feed, step, lead=lead)
            if lead is not None and lead.steps:
                found |= {"lead": median(lead.steps), "lead_most": max(lead.steps)}
            return found

        runs = {name: lambda feed=feed: run(feed) for name, feed in feeds.items()}
        return lambda number: in_turns(runs, number)

    def counted(self) -> dict[str, Any]:
        """Return what penstock's loaders counted."""
        counts = {}
        for way, loader in self._loaders:
            if way.loader == "penstock":
                found = loader.statistics()
                counts[way.name] = {
                    **{name: getattr(found.ring, name) for name in RING}, "uploads": found.uploads,
                    "copy_wait_s": getattr(found, "copy_wait_s", None),
                }  # fmt: skip
        return {"counted": counts}


RING = ("segments", "nbytes", "pinned_nbytes", "copied_out", "oversize", "grown")


# ── corruption ──────────────────────────────────────────────────────────────────────────────────────────────


class Numbers(Dataset[Tensor]):
    """Sample `i` is 16 KiB of the number `i`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4096,), index, dtype=torch.int32)


def _corruption(file: RowFile, workers: int, tiny: bool) -> None:
    for way in (PINNED, AHEAD):
        file.add("corruption", {"way": way.name}, lambda way=way: _wrong(way, 100 if tiny else 10_000, workers))


def _wrong(way: Way, batches: int, workers: int) -> dict[str, int]:
    """Return how many batches came, and how many of their elements were wrong."""
    streams: list[Any] = [torch.cuda.Stream() if CUDA else None for _ in range(4)]
    wrong = [torch.zeros((), dtype=torch.int64, device=PLACE) for _ in streams]
    rows = torch.arange(4, device=PLACE, dtype=torch.int32)[:, None]
    settle()
    found = iter(way.open(Numbers(4 * batches), batch_size=4, num_workers=workers))
    for number in range(batches):
        stream = streams[number % 4]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            batch = next(found)
            if CUDA and number % 16 < 4:
                torch.cuda._sleep(1_000_000)  # so that copies and reads begin long after the batch was dropped
            wrong[number % 4] += (way.moved(batch) != rows + 4 * number).sum()
            del batch
    settle()
    return {"batches": batches, "wrong_elements": sum(int(one) for one in wrong)}


MEASURE: dict[str, Callable[[RowFile, int, bool], None]] = {
    "host": _host, "link": _link, "instructions": _instructions, "steps": _steps, "graph": _graph,
    "corruption": _corruption,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
