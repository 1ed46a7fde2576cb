"""What TrainStep costs: `python -m benchmarks.fit [--quick] [--rows ...] [--json FILE [--resume]]`.

**Overhead**: equal models are stepped by hand, by hand once more (which shows what the measure itself can tell apart)
and by a TrainStep, on the GPU where there is one, else with one thread. In each round each of them takes a step, in an
order drawn anew. A block is 20 rounds; its ratio is that of its medians, so that neither a machine that grows slower
nor a step that was interrupted counts. The result is the median of the blocks' ratios, in seconds and in seconds of
CPU; how far it can be trusted is bootstrapped from the blocks (percentiles 2.5 and 97.5 of 4000 draws).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine_facts import facts_with_gpu
from benchmarks.row_file import RowFile, add_options, measured
from penstock import TrainStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Case = tuple[nn.Module, tuple[Tensor, Tensor]]
LOSS = nn.functional.cross_entropy

BY_HAND, AGAIN, OURS = "by hand", "by hand again", "TrainStep"
BLOCK_ROUNDS = 20
DRAWS = 4000
ROW_S = 240.0
QUICK_ROW_S = 4.0 if DEVICE.type == "cuda" else 30.0


def main() -> int:
    """Measure, print, write; return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROW_S:.0f} s a row instead of {ROW_S:.0f}")
    parser.add_argument("--tiny", action="store_true", help="one block of rounds a row, on small models, for a test")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {'; '.join(ROWS)}")
    add_options(parser)
    asked = parser.parse_args()
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for one another are where a shared machine is loudest
    row_s = 0.0 if asked.tiny else QUICK_ROW_S if asked.quick else ROW_S
    found: dict[str, Any] = {
        "benchmark": "fit",
        "sizes": "tiny" if asked.tiny else "quick" if asked.quick else "full",
        "machine": facts_with_gpu(),
        "date": time.strftime("%Y-%m-%d"),
        "block_rounds": BLOCK_ROUNDS,
        "overhead": [],
    }

    file = RowFile(asked, found)
    for row in ROWS[-3:] if asked.tiny else asked.rows:
        name, _, optimizer = row.partition(", ")
        about = {"name": name, "optimizer": optimizer}
        file.add("overhead", about, lambda about=about: _overhead(**about, row_s=row_s))
    _print({**found, "overhead": measured(found["overhead"])})
    return file.exit_code()


# ── models, in steps of 20 ms and more, and a short one of 4 ms ──────────────────────────────────────────────────────


def _cnn() -> Case:
    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU()]

    size, side = (256, 224) if DEVICE.type == "cuda" else (64, 32)
    model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(128, 10))
    return model, (torch.randn(size, 3, side, side), torch.randint(0, 10, (size,)))


def _mlp() -> Case:
    width, size = (4096, 8192) if DEVICE.type == "cuda" else (512, 320)
    layers = [module for _ in range(3) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)), (torch.randn(size, width), torch.randint(0, 10, (size,)))


def _transformer() -> Case:
    width, length, size, layers = (1024, 256, 16, 8) if DEVICE.type == "cuda" else (128, 32, 12, 2)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(length * width, 10))
    return model, (torch.randn(size, length, width), torch.randint(0, 10, (size,)))


def _short() -> Case:
    layers = [module for _ in range(3) for module in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)), (torch.randn(224, 256), torch.randint(0, 10, (224,)))


CASES: dict[str, Callable[[], Case]] = {"CNN": _cnn, "MLP": _mlp, "transformer": _transformer}
STEPPED = CASES | {"short": _short}
ROWS = [f"{name}, {optimizer}" for name in STEPPED for optimizer in ("SGD", "AdamW", "own")]


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a moving average, as optimizers do that are not torch's: parameter by parameter."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(mean.mul(0.9).add_(p.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


def _made(name: str) -> Case:
    torch.manual_seed(0)
    with DEVICE:  # to draw 100 million weights on the host takes longer than to step them
        return STEPPED[name]()


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return LOSS(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Signs(model.parameters()) if name == "own" else torch.optim.AdamW(model.parameters(), lr=1e-3)


# ── overhead ────────────────────────────────────────────────────────────────────────────────────────────────────


def _overhead(name: str, optimizer: str, row_s: float) -> dict[str, Any]:
    ways: dict[str, Callable[[], object]] = {
        BY_HAND: _by_hand(name, optimizer),
        AGAIN: _by_hand(name, optimizer),
        OURS: _by_train_step(name, optimizer),
    }
    order, shuffle = list(ways), random.Random(0).shuffle
    blocks: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "cpu_s": []} for way in ways}
    _block(ways, order, shuffle)
    end = time.perf_counter() + row_s
    while not blocks[BY_HAND]["seconds"] or time.perf_counter() < end:
        for way, laps in _block(ways, order, shuffle).items():
            for clock, medians in blocks[way].items():
                medians.append(statistics.median(lap[clock] for lap in laps))
    clock = "seconds" if DEVICE.type == "cuda" else "cpu_s"  # which a shared machine stretches less
    ms = {way: round(statistics.median(blocks[way][clock]) * 1e3, 3) for way in ways}
    return {
        "rounds": BLOCK_ROUNDS * len(blocks[BY_HAND]["seconds"]),
        "ms": ms,
        "target": _target(optimizer, ms[BY_HAND]),
        "of_seconds": {way: _ratio(blocks, way, "seconds") for way in (AGAIN, OURS)},
        "of_cpu_s": {way: _ratio(blocks, way, "cpu_s") for way in (AGAIN, OURS)},
        "blocks": blocks,
    }


def _target(optimizer: str, by_hand_ms: float) -> float:
    """Return what a TrainStep may take of a step by hand, in CPU time."""
    return 1.05 if optimizer == "own" else 1.01 if by_hand_ms >= 20 else 1.02


def _by_hand(name: str, optimizer: str) -> Callable[[], object]:
    model, (x, y) = _made(name)
    own = _optimizer(optimizer, model)

    def step() -> None:
        own.zero_grad()
        LOSS(model(x), y).backward()
        own.step()

    return step


def _by_train_step(name: str, optimizer: str) -> Callable[[], object]:
    model, batch = _made(name)
    step = TrainStep(model, _optimizer(optimizer, model), _loss)
    return lambda: step(batch)


def _block(
    ways: dict[str, Callable[[], object]], order: list[str], shuffle: Callable[[list[str]], None]
) -> dict[str, list[dict[str, float]]]:
    """Run the rounds of a block, and return the laps of each way."""
    laps: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    gc.collect()
    for _ in range(BLOCK_ROUNDS):
        shuffle(order)
        for way in order:
            _settle()
            cpu_s, began = time.process_time(), time.perf_counter()
            ways[way]()
            _settle()
            laps[way].append({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s})
    return laps


def _ratio(blocks: dict[str, dict[str, list[float]]], way: str, clock: str) -> dict[str, float]:
    """Return the median of the blocks' ratios of a way to the steps by hand, and the bounds of 95 %."""
    ratios = np.array(blocks[way][clock]) / np.array(blocks[BY_HAND][clock])
    drawn = np.random.default_rng(0).integers(0, len(ratios), (DRAWS, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), (0.025, 0.975))
    found = {"ratio": np.median(ratios), "low": low, "high": high}
    return {name: round(float(value), 5) for name, value in found.items()}


def _settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


# ── print ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _bounds(one: dict[str, float]) -> str:
    return f"{one['ratio']:.4f} ({one['low']:.4f} … {one['high']:.4f})"


def _print(found: dict[str, Any]) -> None:
    for row in found["overhead"]:
        ratios = [
            f"{way} {_bounds(row[of][way])} of {of[3:]}" for of in ("of_seconds", "of_cpu_s") for way in (OURS, AGAIN)
        ]
        by_hand = f"{row['ms'][BY_HAND]:.1f} ms by hand, {row['rounds']} rounds"
        print(f"{row['name']}, {row['optimizer']}, {by_hand}: {', '.join(ratios)}")
    rows = found["overhead"]
    if not rows:
        return
    reached = sum(row["of_cpu_s"][OURS]["ratio"] <= row["target"] for row in rows)
    most = max((row["of_cpu_s"][OURS] for row in rows), key=lambda one: one["ratio"])
    ours = f"TrainStep takes {_bounds(most)} of a step by hand at most, in CPU time"
    print(f"fit: {ours}; {reached} of {len(rows)} rows reach their target; {found['seconds']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
