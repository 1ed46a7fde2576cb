"""`penstock.shared` beside a list, and positions of mixtures: `python -m benchmarks.shared [--quick] [--json FILE]`.

Memory: what is private to one worker after it has read all of some tuples (a forked one: what that grew by). Access:
CPU time per item in random order, the least of interleaved rounds; also of pickles in a torch tensor, the usual remedy.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from benchmarks.machine_facts import facts
from penstock.core.host import private_nbytes

LOADERS: dict[str, Callable[..., Any]] = {"torch": TorchDataLoader, "penstock": penstock.DataLoader}


class Read(Dataset[Any]):
    """Sample 0 reads everything, and returns the private bytes of its process before and after that."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        before = private_nbytes(os.getpid()) or 0
        for name, _ in self.rows:
            len(name)
        return torch.tensor([before, private_nbytes(os.getpid()) or 0])


class InTensor:
    """Pickles one after another in a tensor."""

    def __init__(self, rows: Sequence[Any]) -> None:
        parts = [np.frombuffer(pickle.dumps(row), np.uint8) for row in rows]
        self.ends = torch.tensor(np.cumsum([len(part) for part in parts]))
        self.data = torch.tensor(np.concatenate(parts))

    def __getitem__(self, index: int) -> Any:
        start = int(self.ends[index - 1]) if index else 0
        return pickle.loads(memoryview(self.data[start : int(self.ends[index])].numpy()))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the items")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    count = 50_000 if asked.quick else 500_000
    rows = [(f"image-{number}.jpg", float(number)) for number in range(count)]
    began = time.process_time()
    kinds = {"list": rows, "shared": penstock.shared(rows)}
    build_s = time.process_time() - began
    memory = {
        f"{method}, {name}, {kind}": _grown_mib(loader, method, held)
        for method in ("fork", "spawn")
        for name, loader in LOADERS.items()
        for kind, held in kinds.items()
    }
    items = {"tuple": rows, "text": [row[0] for row in rows], "number": [*range(count)]}
    access = {
        name: _access_us({"list": held, "shared": penstock.shared(held), "in a tensor": InTensor(held)})
        for name, held in items.items()
    }
    chance = random.Random(0)
    orders = {
        "in order": (1, range(20_000)),
        "random": (1, chance.sample(range(10**6), 20_000)),
        "random of 10^9": (1000, chance.sample(range(10**9), 20_000)),
    }
    mix = {
        f"mix, {'shuffled, ' * is_shuffled}{name}": _per_item_us(_mixture(is_shuffled, times).locate, order)
        for is_shuffled in (False, True)
        for name, (times, order) in orders.items()
    }
    found = {
        "benchmark": "shared", "machine": facts(), "load": os.getloadavg()[0], "items": count, "build_s": build_s,
        "memory_mib": memory, "access_us": access, "mix_us": mix,
    }  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    flat = {f"{name}, {kind}": us for name, kinds in access.items() for kind, us in kinds.items()}
    for name, figure in memory.items():
        print(f"{name:<32}{figure:8.2f} MiB")
    for name, figure in {**flat, **mix}.items():
        print(f"{name:<32}{figure:8.2f} µs")
    grown = [memory[f"fork, penstock, {kind}"] for kind in ("shared", "list")]
    print(
        f"shared: a forked worker has {grown[0]:.1f} MiB more after {count} tuples, {grown[1]:.1f} from a list; "
        f"a tuple takes {access['tuple']['shared']:.1f} µs, from a list {access['tuple']['list']:.1f}"
    )


def _mixture(is_shuffled: bool, times: int) -> Any:
    sources = [(range(10**6 * times), 0.7), (range(10**5 * times), 0.2), (range(10**5 * times), 0.1)]
    return penstock.mix(sources, seed=0, shuffle=is_shuffled, stop="all_exhausted")


def _grown_mib(loader: Callable[..., Any], method: str, rows: Sequence[Any]) -> float:
    (found,) = loader(Read(rows), batch_size=None, num_workers=1, multiprocessing_context=method)
    before, after = found.tolist()
    return (after - before if method == "fork" else after) / (1 << 20)


def _access_us(kinds: dict[str, Any]) -> dict[str, float]:
    order = random.Random(0).sample(range(len(kinds["list"])), 20_000)
    rounds = [{kind: _per_item_us(held.__getitem__, order) for kind, held in kinds.items()} for _ in range(5)]
    return {kind: min(one[kind] for one in rounds) for kind in kinds}


def _per_item_us(read: Callable[[int], Any], order: Sequence[int]) -> float:
    began = time.process_time()
    for index in order:
        read(index)
    return (time.process_time() - began) / len(order) * 1e6


if __name__ == "__main__":
    main()
