"""What TrainStep costs and what plans are worth: `python -m benchmarks.fit [--quick] [--json FILE]`.

**Overhead**: a step by hand and a TrainStep of equal models take turns, on the GPU where there is one; the ratio is
taken round by round. **Plans**, on a GPU only: the predicted peak against `max_memory_allocated`, for several models;
and whether the recommended micro-batch runs within a budget that is enforced, and twice of it does not.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.machine import facts
from penstock import TrainStep, plan
from penstock.core.units import size_text

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Case = tuple[nn.Module, tuple[Tensor, Tensor]]
LOSS = nn.functional.cross_entropy


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    began = time.perf_counter()
    rounds = 20 if asked.quick else 200
    overhead = [_overhead(name, optimizer, rounds) for name in CASES for optimizer in ("SGD", "AdamW")]
    plans = [_plan(name) for name in CASES] if DEVICE.type == "cuda" else []
    gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if DEVICE.type == "cuda" else {}
    found = {
        "benchmark": "fit",
        "quick": asked.quick,
        "machine": {**facts(), **gpu},
        "date": time.strftime("%Y-%m-%d"),
        "overhead": overhead,
        "plans": plans,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    _print(found)


# ── models, in steps of 20 ms and more ──────────────────────────────────────────────────────────────────────────


def _cnn() -> Case:
    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU()]

    size, side = (256, 224) if DEVICE.type == "cuda" else (512, 32)
    model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(128, 10))
    return model, (torch.randn(size, 3, side, side), torch.randint(0, 10, (size,)))


def _mlp() -> Case:
    width, size = (4096, 16384) if DEVICE.type == "cuda" else (512, 1024)
    layers = [module for _ in range(3) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)), (torch.randn(size, width), torch.randint(0, 10, (size,)))


def _transformer() -> Case:
    width, length, size, layers = (1024, 512, 32, 8) if DEVICE.type == "cuda" else (128, 64, 16, 2)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(length * width, 10))
    return model, (torch.randn(size, length, width), torch.randint(0, 10, (size,)))


CASES: dict[str, Callable[[], Case]] = {"CNN": _cnn, "MLP": _mlp, "transformer": _transformer}


def _made(name: str) -> Case:
    torch.manual_seed(0)
    model, (x, y) = CASES[name]()
    return model.to(DEVICE), (x.to(DEVICE), y.to(DEVICE))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return LOSS(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# ── overhead ────────────────────────────────────────────────────────────────────────────────────────────────────


def _overhead(name: str, optimizer: str, rounds: int) -> dict[str, Any]:
    model, batch = _made(name)
    other = copy.deepcopy(model)
    by_hand, own = _optimizer(optimizer, model), _optimizer(optimizer, other)
    step = TrainStep(other, own, _loss)

    def hand() -> None:
        by_hand.zero_grad()
        LOSS(model(batch[0]), batch[1]).backward()
        by_hand.step()

    contestants: dict[str, Callable[[], object]] = {"by hand": hand, "TrainStep": lambda: step(batch)}
    seconds: dict[str, list[float]] = {key: [] for key in contestants}
    for number in range(rounds + 5):
        order = list(contestants.items())
        for key, run in reversed(order) if number % 2 else order:
            _settle()
            start = time.perf_counter()
            run()
            _settle()
            if number >= 5:
                seconds[key].append(time.perf_counter() - start)
    ratios = [own / hand for own, hand in zip(seconds["TrainStep"], seconds["by hand"], strict=True)]
    return {"name": name, "optimizer": optimizer, "seconds": seconds, "ratios": ratios}


def _settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(name: str) -> dict[str, Any]:
    """Compare the predicted peak with the allocator's, then run what is recommended, and twice of it, in a budget."""
    model, batch = _made(name)
    optimizer = _optimizer("AdamW", model)
    whole = plan(model, _loss, batch, optimizer, budget="1000TiB", modes=("plain",))
    pairs = [(way.parts, way.peak_nbytes, _peak(model, optimizer, batch, way.micro_batch)) for way in whole.ways[:5]]
    quarter = next(way for way in whole.ways if way.parts == 4)
    budget = int(quarter.peak_nbytes * (1 + whole.error) * 1.01)
    return {
        "name": name,
        "parts, predicted, measured": pairs,
        "recommended": quarter.micro_batch,
        "recommended_runs": _peak(model, optimizer, batch, quarter.micro_batch) <= budget,
        "twice_runs": _peak(model, optimizer, batch, 2 * quarter.micro_batch) <= budget,
    }


def _peak(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, micro_batch: int) -> int:
    step = TrainStep(model, optimizer, _loss, micro_batch=micro_batch, batch_coupled=["BatchNorm2d"])
    step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


# ── print ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def _print(found: dict[str, Any]) -> None:
    console = Console(width=120)
    table = Table(title="a step by hand, and a TrainStep")
    for head in ("model", "optimizer", "by hand, ms", "TrainStep, ms", "ratio (quartiles)"):
        table.add_column(head)
    medians = []
    for row in found["overhead"]:
        low, middle, high = _quartiles(row["ratios"])
        medians.append(middle)
        times = [f"{statistics.median(row['seconds'][key]) * 1e3:.2f}" for key in ("by hand", "TrainStep")]
        table.add_row(row["name"], row["optimizer"], *times, f"{middle:.3f} ({low:.3f} … {high:.3f})")
    console.print(table)
    errors = []
    for row in found["plans"]:
        for parts, predicted, measured in row["parts, predicted, measured"]:
            errors.append(abs(predicted / measured - 1))
            console.print(
                f"{row['name']}, {parts} parts: {size_text(predicted)} predicted, {size_text(measured)} measured"
            )
        runs = f"recommended runs: {row['recommended_runs']}, twice of it: {row['twice_runs']}"
        console.print(f"{row['name']}: {runs}")
    worst = f"; plans are off by {max(errors):.1%} at most (target 5 %)" if errors else ""
    most = f"TrainStep takes {max(medians):.3f} of a step by hand at most (target 1.02)"
    print(f"fit: {most}{worst}; {found['seconds']:.0f} s")


if __name__ == "__main__":
    main()
