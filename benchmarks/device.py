"""From host memory to the GPU: `python -m benchmarks.device [--quick] [--json FILE [--resume]]`.

**Costs**: what page-locking a slot, a fence behind all streams, and lending a slot take.
**Link**: the bandwidth of a copy from a slot, from memory pinned by torch and from pageable
memory, against the link's ceiling (torch's pinned memory, the largest size). **Steps**: a training step fed with data
that lies on the GPU already (the upper bound), by torch's DataLoader with a plain `.to` and with `pin_memory=True` and
`.to(..., non_blocking=True)`, by penstock with `pin_memory=True` and a plain `.to`, and by penstock with `device=`. The
five take turns; a ratio is taken within each round. The share of GPU time without work is 1 minus the ratio to the
upper bound. An epoch begins with a batch that nobody has made yet, and data that lies there has none to wait for: the
ratio is also given from the first batch on. **Corruption**: 10^5 batches from pinned slots, copied by the user on four
streams that lag behind, the views dropped at once; every byte is compared on the GPU. With --tiny, for tests, it needs
no GPU: then it runs on the simulated one, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from benchmarks.machine_facts import facts_with_gpu
from benchmarks.row_file import RowFile, add_options, measured
from benchmarks.workloads import Pool, Workload, clips, images, tokens
from penstock import DataLoader
from penstock.core.shared_segment import PrivateSegment
from penstock.device import Device, Event, TensorSpec, device_of
from penstock.loader.transport.ring import Ring

WORKERS = 8
PARTS = ("costs", "link", "steps", "corruption")
SIZES_MIB = (1, 4, 16, 64, 256)
CUDA = torch.cuda.is_available()
PLACE = "cuda" if CUDA else "cpu"
"""Where models lie: the simulated device's memory is the host's."""


def main() -> int:
    """Measure, print, write; return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds of short epochs")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test, with or without a GPU")
    add_options(parser)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="only these")
    asked = parser.parse_args()
    if not CUDA and not asked.tiny:
        sys.exit("benchmarks.device needs an NVIDIA GPU, and there is none here")
    device = device_of("cuda" if CUDA else "sim")
    rounds, workers = (1, 1) if asked.tiny else (3 if asked.quick else 5, asked.workers)
    found: dict[str, Any] = {
        "benchmark": "device",
        "sizes": "tiny" if asked.tiny else "quick" if asked.quick else "full",
        "workers": workers,
        "machine": facts_with_gpu(),
        "date": time.strftime("%Y-%m-%d"),
        "costs": [],
        "link": [],
        "steps": [],
        "corruption": None,
    }

    file = RowFile(asked, found)
    there = [row.get("mib", row.get("name")) for row in found["link"] + found["steps"]]
    if "corruption" in asked.parts and found["corruption"] is None:
        found["corruption"] = _corruption(100 if asked.tiny else 10_000 if asked.quick else 100_000, workers)
        file.write()
    if "costs" in asked.parts and not found["costs"]:
        found["costs"] = costs(device, (1,), 2) if asked.tiny else costs(device)
        file.write()
    for size in SIZES_MIB[: 1 if asked.tiny else None] if "link" in asked.parts else ():
        if size not in there:
            file.add("link", {"mib": size}, lambda size=size: _link(device, size, rounds))
    for name, make in (TINY_LOOPS if asked.tiny else LOOPS).items() if "steps" in asked.parts else ():
        if name not in there:
            batches = 40 if asked.quick else 120
            file.add(
                "steps", {"name": name}, lambda make=make, batches=batches: _steps(*make(batches), workers, rounds)
            )
    _print({name: measured(value) for name, value in found.items()})
    return file.exit_code()


# ── costs ───────────────────────────────────────────────────────────────────────────────────────────────────


def costs(device: Device, sizes_mib: Sequence[int] = (1, 16, 64), laps: int = 20) -> list[dict[str, Any]]:
    """Return rows of microseconds, one for each lap: of registering slots, of fences, of a slot that is lent."""
    rows: list[dict[str, Any]] = []
    for mib in sizes_mib:
        found: dict[str, list[float]] = {f"register {mib} MiB": [], f"unregister {mib} MiB": []}
        for _ in range(laps):
            segment = PrivateSegment(mib << 20)
            np.frombuffer(segment.memory, np.uint8)[:] = 1  # not the price of its first pages
            began = time.perf_counter()
            registration = device.register(segment.memory)
            found[f"register {mib} MiB"].append((time.perf_counter() - began) * 1e6)
            if registration is None:
                break
            began = time.perf_counter()
            registration.close()
            found[f"unregister {mib} MiB"].append((time.perf_counter() - began) * 1e6)
        rows += [{"of": name, "us": values} for name, values in found.items()]
    fences: list[float] = []
    for _ in range(50 * laps):
        began = time.perf_counter()
        fence = device.fence()
        if fence is None:
            break
        fence.query()
        fences.append((time.perf_counter() - began) * 1e6)
    rows.append({"of": "fence, and one query", "us": fences})
    rows.append({"of": "slot lent and returned", "us": _leases(device, 50 * laps)})
    return rows


def _leases(device: Device, laps: int) -> list[float]:
    ring, found = Ring(PrivateSegment, 1 << 26, pin=device.register, fence=device.fence), []
    for _ in range(laps):
        began = time.perf_counter()
        slot = ring.acquire_larger(1 << 16)
        assert slot is not None
        ring.commit(slot, 1 << 16)
        lent = ring.lend(slot)
        del lent
        found.append((time.perf_counter() - began) * 1e6)
    ring.close()
    return found


# ── the link ────────────────────────────────────────────────────────────────────────────────────────────────


def _link(device: Device, mib: int, rounds: int) -> dict[str, Any]:
    nbytes = mib << 20
    slab = PrivateSegment(nbytes)
    slot = torch.from_numpy(np.frombuffer(slab.memory, np.uint8))
    slot.fill_(1)
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    sources = {"slot": slot, "torch pinned": pageable.pin_memory() if CUDA else pageable, "pageable": pageable}
    registration = device.register(slab.memory)
    target = device.empty(TensorSpec.of(slot))
    copies = max(4, (1 << 30) // nbytes)

    def copy(name: str) -> Event:
        if name == "pageable" and CUDA:  # as `.to` copies it; `upload` would go by way of torch's pinned memory
            target.copy_(pageable)
            return device.record_event()
        return device.upload([(target, sources[name])], device.record_event())

    rates: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(rounds + 1):
        for name in sources:
            device.record_event().synchronize()
            start = time.perf_counter()
            for _ in range(copies):
                event = copy(name)
            event.synchronize()
            rates[name].append(nbytes * copies / (time.perf_counter() - start) / 1e9)
    if registration is not None:
        registration.close()
    is_pinned = registration is not None
    return {"is_pinned": is_pinned, "gb_per_s": {name: each[1:] for name, each in rates.items()}}


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
    """Four layers over sequences of 2048 tokens, of which a quarter is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(512, 1000)

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.embedding(batch[:, :512])).mean(1))
        return found


def _volumes() -> nn.Module:
    """A small 3-D CNN."""
    return nn.Sequential(
        nn.Conv3d(3, 32, 3, (1, 2, 2), 1), nn.ReLU(inplace=True),
        nn.Conv3d(32, 64, 3, 2, 1), nn.ReLU(inplace=True),
        nn.Conv3d(64, 128, 3, 2, 1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 400),
    )  # fmt: skip


def _training(model: nn.Module, prepare: Callable[[Tensor], Tensor] = lambda batch: batch) -> Step:
    model = model.to(PLACE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(batch: Tensor) -> None:
        with torch.autocast(PLACE, torch.bfloat16):
            loss = model(prepare(batch)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _few_rows(batches: int) -> Workload:
    return Workload(name="tiny rows", dataset=Pool((16,), np.float32, 8), batch_size=4, batches=2)


Step = Callable[[Tensor], None]
LOOPS: dict[str, Callable[[int], tuple[Workload, Step]]] = {
    "float images": lambda batches: (images(batches), _training(_convolutions())),
    "tokens": lambda batches: (tokens(batches), _training(_Transformer(), lambda batch: batch % 32_000)),
    "uint8 clips": lambda batches: (
        clips(batches), _training(_volumes(), lambda batch: batch.float().div_(255).transpose(1, 2))
    ),
}  # fmt: skip
"""Workloads by their name, with a model that trains on them in steps of some tens of milliseconds."""

TINY_LOOPS: dict[str, Callable[[int], tuple[Workload, Step]]] = {
    "tiny rows": lambda batches: (_few_rows(batches), _training(nn.Linear(16, 8)))
}


def _steps(workload: Workload, step: Step, workers: int, rounds: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "batch_size": workload.batch_size, "num_workers": workers, "persistent_workers": True
    }  # fmt: skip
    resident = next(iter(TorchDataLoader(workload.dataset, batch_size=workload.batch_size))).to(PLACE)
    feeds: dict[str, Callable[[], Iterator[Tensor]]] = {
        "resident": lambda: (resident for _ in range(workload.batches)),
    }
    plain = TorchDataLoader(workload.dataset, **options)
    torchs = TorchDataLoader(workload.dataset, pin_memory=CUDA, **options)
    pinned = DataLoader(workload.dataset, pin_memory=CUDA, **options)
    ahead = DataLoader(workload.dataset, device="cuda" if CUDA else "sim", **options)
    feeds["torch, .to"] = lambda: (batch.to(PLACE) for batch in plain)
    feeds["torch, pin_memory, non_blocking"] = lambda: (batch.to(PLACE, non_blocking=True) for batch in torchs)
    feeds["penstock, pin_memory, .to"] = lambda: (batch.to(PLACE) for batch in pinned)
    feeds["penstock, device="] = lambda: iter(ahead)
    seconds: dict[str, list[float]] = {name: [] for name in feeds}
    firsts: dict[str, list[float]] = {name: [] for name in feeds}
    for number in range(rounds + 1):
        names = list(feeds)
        for name in reversed(names) if number % 2 else names:
            _settle()
            start = time.perf_counter()
            first_s = None
            for batch in feeds[name]():
                first_s = time.perf_counter() - start if first_s is None else first_s
                step(batch)
            _settle()
            if number:
                seconds[name].append(time.perf_counter() - start)
                firsts[name].append(first_s or 0.0)
    rates = {name: [workload.samples / each for each in values] for name, values in seconds.items()}
    flowing = {
        name: [(whole - first) for whole, first in zip(seconds[name], firsts[name], strict=True)] for name in feeds
    }

    def of(other: str) -> dict[str, list[float]]:
        return {name: [a / b for a, b in zip(values, rates[other], strict=True)] for name, values in rates.items()}

    return {
        "samples_per_s": rates,
        "of_the_bound": of("resident"),
        "of_plain": of("torch, .to"),
        "first_batch_ms": {name: [first * 1e3 for first in values] for name, values in firsts.items()},
        "of_the_bound_after_first": {
            name: [bound / own for bound, own in zip(flowing["resident"], values, strict=True)]
            for name, values in flowing.items()
        },
        "step_ms": statistics.median(seconds["resident"]) / workload.batches * 1e3,
        "uploads": ahead.statistics().uploads,
        "uploads_hidden": ahead.statistics().uploads_hidden,
    }


def _settle() -> None:
    if CUDA:
        torch.cuda.synchronize()


# ── corruption ──────────────────────────────────────────────────────────────────────────────────────────────


class Numbers(Dataset[Tensor]):
    """Sample `i` is 16 KiB of the number `i`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4096,), index, dtype=torch.int32)


def _corruption(batches: int, workers: int) -> dict[str, int]:
    """Return how many batches were copied, and how many elements of them were wrong."""
    streams = [torch.cuda.stream(torch.cuda.Stream()) if CUDA else nullcontext() for _ in range(4)]
    wrong = [torch.zeros((), dtype=torch.int64, device=PLACE) for _ in streams]
    rows = torch.arange(4, device=PLACE, dtype=torch.int32)[:, None]
    _settle()
    loader = DataLoader(Numbers(4 * batches), batch_size=4, num_workers=workers, pin_memory=CUDA)
    for number, batch in enumerate(loader):
        with streams[number % 4]:
            if CUDA and number % 16 < 4:
                torch.cuda._sleep(1_000_000)  # so that copies begin long after their views have died
            wrong[number % 4] += (batch.to(PLACE, non_blocking=True) != rows + 4 * number).sum()
    del batch
    _settle()
    return {"batches": batches, "wrong_elements": sum(int(one) for one in wrong)}


# ── print ───────────────────────────────────────────────────────────────────────────────────────────────────


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


def _print(found: dict[str, Any]) -> None:
    for row in found["costs"]:
        print(f"{row['of']}: {_spread(row['us'], 1) if row['us'] else 'refused'} us")
    for row in found["link"]:
        rates = ", ".join(f"{name} {_spread(values, 1)}" for name, values in row["gb_per_s"].items())
        print(f"{row['mib']} MiB, GB/s: {rates}")
    for row in found["steps"]:
        print(f"{row['name']}, steps of {row['step_ms']:.1f} ms:")
        for name, rates in row["samples_per_s"].items():
            bound = f"{_spread(row['of_the_bound'][name], 3)} of the bound"
            first = f"{statistics.median(row['first_batch_ms'][name]):.1f} ms"
            after = f"{_spread(row['of_the_bound_after_first'][name], 3)} from the first batch on, which took {first}"
            print(f"  {name}: {_spread(rates, 0)} samples/s, {bound}; {after}")
    said = []
    if found["link"]:
        ceiling = max(max(row["gb_per_s"]["torch pinned"]) for row in found["link"])
        slot = max(statistics.median(row["gb_per_s"]["slot"]) for row in found["link"])
        said.append(f"slots reach {slot / ceiling:.2f} of the link's {ceiling:.1f} GB/s (target 0.95)")
    if found["steps"]:
        least = min(statistics.median(row["of_the_bound"]["penstock, device="]) for row in found["steps"])
        plain = min(statistics.median(row["of_plain"]["penstock, device="]) for row in found["steps"])
        after = min(statistics.median(row["of_the_bound_after_first"]["penstock, device="]) for row in found["steps"])
        said.append(
            f"device= reaches at least {least:.3f} of the upper bound, {after:.3f} after the first batch (target 0.98)"
        )
        said.append(f"and {plain:.3f} of a plain .to (target 0.99)")
    if found["corruption"]:
        wrong = found["corruption"]
        said.append(f"{wrong['wrong_elements']} wrong elements in {wrong['batches']} batches")
    print(f"device: {'; '.join(said) or 'costs'}; {found['seconds']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
