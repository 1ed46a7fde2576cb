"""Examines one program of benchmarks/pathologies as `penstock doctor` does, and prints the measurements as JSON.

Where the program has `fixed`, the loop as it is after what is to be changed, both are timed too, in turns:
"steps_per_s" has a pair of figures (as is, fixed) for each round.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.observe.doctor.examine import examine

ROUNDS, ROUND_S = 3, 1.0


class TimeIsOverError(Exception):
    """Ends a training function."""


def main(script: str, seconds: str, cgroup: str, follow: str) -> None:
    """Examine `script` for `seconds`, with `cgroup` as the folder that shows the control group; then `follow` or ""."""
    module = importlib.import_module(script)
    for file, text in getattr(module, "CGROUP", {}).items():
        (Path(cgroup) / file).write_text(text)
    loop = getattr(module, "main", None) or module.train
    found = examine(loop, name=script, seconds=float(seconds), cgroup=Path(cgroup))
    shm_nbytes = getattr(module, "SHM_NBYTES", None)
    if shm_nbytes is not None:
        found = replace(found, machine=replace(found.machine, shm_nbytes=shm_nbytes, shm_free_nbytes=shm_nbytes))
    steps_per_s = []
    if follow and hasattr(module, "fixed"):
        steps_per_s = [(_steps_per_s(module, loop), _steps_per_s(module, module.fixed)) for _ in range(ROUNDS)]
    importlib.import_module("work").clean_up()
    print(json.dumps({"measurements": asdict(found), "steps_per_s": steps_per_s}, default=repr))


def _steps_per_s(module: ModuleType, loop: Callable[[], Any]) -> float:
    """Return the pace of a loop from its first step on: of its epochs, with the starts of all but the first."""
    times: list[float] = []

    def step_taken() -> None:
        times.append(time.perf_counter())
        if times[-1] - times[0] > ROUND_S:
            raise TimeIsOverError

    try:
        if loop is getattr(module, "train", None) or not hasattr(module, "main"):
            _train(module, loop, step_taken)
        else:
            loader, step = loop()
            while True:
                for batch in loader:
                    step(batch)
                    step_taken()
    except TimeIsOverError:
        pass
    gc.collect()  # an iterator of torch's that is collected in a forked worker writes a traceback
    return (len(times) - 1) / (times[-1] - times[0])


def _train(module: ModuleType, train: Callable[[], Any], step_taken: Callable[[], None]) -> None:
    """Run a training function, whose steps call `compute`."""
    compute = module.compute

    def counted(units: int) -> None:
        compute(units)
        step_taken()

    module.compute = counted  # type: ignore[attr-defined]
    try:
        train()
    finally:
        module.compute = compute  # type: ignore[attr-defined]


if __name__ == "__main__":
    warnings.simplefilter("error")
    for message in ("This DataLoader will create", "'pin_memory' argument is set", "This process .* is multi-threaded"):
        warnings.filterwarnings("ignore", message)
    main(*sys.argv[1:])
