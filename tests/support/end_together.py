"""How ranks run their cases in these tests, and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def end_together() -> None:
    """End this process when all ranks have come here, without torch's destructors.

    With torch 2.13 those of a process group join gloo's thread while they hold Python's lock, and the thread may be
    waiting for that to let go of a tensor: one run in some dozen then never ends. Ranks that do not end together abort.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_cases(run: Callable[[str], None], folder: str, *cases: str) -> None:
    """Run these cases one after another, and note in the folder which have passed on this rank; then end."""
    dist.init_process_group("gloo")
    for case in cases:
        run(case)
        Path(folder, f"{case}.{dist.get_rank()}").touch()
    end_together()
