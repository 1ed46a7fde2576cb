"""Ray Data's batches, beside its `iter_torch_batches`: `python -m benchmarks.ray_batches [--quick] [--json FILE]`.

A Ray cluster of this machine alone. Each case is a dataset whose blocks lie in Ray's store (`materialize`), or one
that Ray makes anew in each epoch. A round runs an epoch of each, in a shuffled order: of `iter_torch_batches`, of
`penstock.ray_dataset` in a DataLoader, whose batches are views of Ray's store, as those of `iter_torch_batches` are,
and of the same with `writable=True`, which copies. The loop reads each batch once. A figure is the time of the loop per
batch, and the CPU time of its process per batch; a ratio is penstock's divided by Ray's in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.benchmark_result import Spread
from benchmarks.machine_facts import facts
from penstock import DataLoader, ray_dataset

_PREFETCH = 2


def _numbers() -> Any:
    import ray.data

    return ray.data.from_numpy([np.random.rand(100_000, 8).astype(np.float32) for _ in range(8)]).materialize()


def _images(count: int) -> Callable[[], Any]:
    """Return what makes `count` images of 3x224x224, 128 in a block."""

    def make() -> Any:
        import ray.data

        blocks = [np.random.randint(0, 255, (128, 3, 224, 224), np.uint8) for _ in range(count // 128)]
        return ray.data.from_numpy(blocks).materialize()

    return make


def _mapped() -> Any:
    """Images that a task makes in each epoch."""
    import ray.data

    def images(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"id": batch["id"], "data": np.ones((len(batch["id"]), 3, 224, 224), np.uint8)}

    return ray.data.range(1024, override_num_blocks=8).map_batches(images, batch_size=128)


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "8 floats a row, batches of 256": (_numbers, 256),
    "8 floats a row, batches of 4096": (_numbers, 4096),
    "images, batches of 16": (_images(2048), 16),
    "images, batches of 64": (_images(2048), 64),
    "images, batches of 100, across blocks": (_images(2048), 100),
    "images made in each epoch, batches of 64": (_mapped, 64),
}
"""Each dataset, and the rows of a batch."""

LOOPS: dict[str, Callable[[Any, int], Iterable[dict[str, torch.Tensor]]]] = {
    "iter_torch_batches": lambda ds, rows: ds.iterator().iter_torch_batches(
        batch_size=rows, prefetch_batches=_PREFETCH
    ),
    "penstock": lambda ds, rows: DataLoader(ray_dataset(ds, batch_size=rows), batch_size=None),
    "penstock, writable=True": lambda ds, rows: DataLoader(
        ray_dataset(ds, batch_size=rows, writable=True), batch_size=None
    ),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_batches", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ray-") as home:
        os.environ["RAY_TMPDIR"] = home
        found = _measure(rounds=5 if asked.quick else 15)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    for case, ratios in found["ratios"].items():
        for loop, kinds in ratios.items():
            texts = []
            for kind, values in kinds.items():
                spread = Spread.of(values)
                texts.append(f"{kind} {spread.median:.2f} ({spread.lowest:.2f} … {spread.highest:.2f})")
            print(f"{case}: {loop}: {', '.join(texts)}")


def _measure(*, rounds: int) -> dict[str, Any]:
    import ray
    import ray.data

    ray.init(
        num_cpus=2,
        log_to_driver=False,
        logging_level="error",
        include_dashboard=False,
        object_store_memory=1 << 30,
        _node_ip_address="127.0.0.1",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    try:
        for case, (make, rows) in CASES.items():
            figures[case] = _case(make(), rows, rounds)
    finally:
        ray.shutdown()
    return {
        "benchmark": "ray_batches",
        "machine": {**facts(), "ray": ray.__version__},
        "rounds": rounds,
        "ms_per_batch": figures,
        "ratios": {case: _ratios(each) for case, each in figures.items()},
    }


def _ratios(figures: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    theirs, *ours = LOOPS
    return {
        loop: {
            kind: [mine / other for mine, other in zip(values, figures[theirs][kind], strict=True)]
            for kind, values in figures[loop].items()
        }
        for loop in ours
    }


def _case(ds: Any, rows: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds per batch of each round, by loop and kind of time."""
    found: dict[str, dict[str, list[float]]] = {loop: {"time": [], "cpu": []} for loop in LOOPS}
    order = random.Random(0)
    for number in range(rounds + 1):  # the first to warm up
        for loop in order.sample([*LOOPS], len(LOOPS)):
            batches = LOOPS[loop](ds, rows)
            began, cpu, count = time.perf_counter(), time.process_time(), 0
            for batch in batches:
                for tensor in batch.values():
                    tensor.view(torch.uint8).numpy().max()
                count += 1
            if number:
                found[loop]["time"].append((time.perf_counter() - began) / count * 1e3)
                found[loop]["cpu"].append((time.process_time() - cpu) / count * 1e3)
    return found


if __name__ == "__main__":
    main()
