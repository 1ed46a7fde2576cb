"""Examines one script of tests/pathologies in a process of its own, as `penstock doctor` does, and prints JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.rendering import render


def main(script: str, seconds: str, cgroup: str) -> None:
    """Examine `script` for `seconds`, with `cgroup` as the folder that shows the control group."""
    module = importlib.import_module(script)
    for file, text in getattr(module, "CGROUP", {}).items():
        (Path(cgroup) / file).write_text(text)
    loop = getattr(module, "main", None) or module.train
    found = examine(loop, name=script, seconds=float(seconds), cgroup=Path(cgroup))
    shm_nbytes = getattr(module, "SHM_NBYTES", None)
    if shm_nbytes is not None:
        found = replace(found, machine=replace(found.machine, shm_nbytes=shm_nbytes, shm_free_nbytes=shm_nbytes))
    diagnosis = diagnose(found)
    importlib.import_module("work").clean_up()
    print(json.dumps({**asdict(diagnosis), "text": render(found, diagnosis)}))


if __name__ == "__main__":
    warnings.simplefilter("error")
    for message in ("This DataLoader will create", "'pin_memory' argument is set", "This process .* is multi-threaded"):
        warnings.filterwarnings("ignore", message)
    main(*sys.argv[1:])
