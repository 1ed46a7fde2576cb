"""The folder of a run: a new one for each, so that no run overwrites the files of an earlier one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import OptionError
from penstock.core.ranks import Ranks
from penstock.observe.meters.process_state import start_ticks

RUNS = Path("penstock-runs")


def run_folder(command: Sequence[str], ranks: Ranks) -> Path:
    """Return the folder for a run of this process, below `RUNS`; it is made when something is written to it.

    Its name begins with the time, so that the newest is last, and ends with a process number: this one's, or that of
    the launcher for the ranks of one machine, which share the folder.
    """
    pid = os.getppid() if ranks.world_size > 1 else os.getpid()
    program = command[1] if command[0] == "-m" else Path(command[0]).stem
    stem = re.sub(r"[^\w.-]+", "_", program) or "run"
    return RUNS / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(_started_s(pid)))}-{stem}-{pid}"


def run_file(given: Path | None) -> Path:
    """Return the run.json that is meant: a file, that of a run's folder, or that of the newest run.

    Raises:
        OptionError: there is no run.
    """
    if given is None:
        runs = sorted(RUNS.glob("*/run.json"))
        if not runs:
            raise OptionError(f"there is no run in {RUNS}{os.sep}; give a file, as in `penstock report run.json`")
        return runs[-1]
    return given / "run.json" if given.is_dir() else given


def _started_s(pid: int) -> int:
    """Return when a process started, in seconds since 1970: the same for all that ask."""
    ticks = start_ticks(pid)
    try:
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return int(time.time())
    return int(time.time()) if ticks is None else int(boot.split()[1]) + ticks // os.sysconf("SC_CLK_TCK")
