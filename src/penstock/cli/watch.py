"""`penstock watch`."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.observe.live.status_file import StatusRecord

_DRAW_PERIOD_S = 0.5
_LINE_PERIOD_S = 5.0


class Watch:
    """Show the live panel of a running `penstock run`, from another terminal.

    Without PID, penstock shows your only run on this machine. Ctrl-C ends `penstock watch`, not the run. If the output
    is not a terminal, penstock prints a line every five seconds.
    """

    name = "watch"
    examples = (
        ("penstock watch", "your only run on this machine"),
        ("penstock watch --json 4834", "the figures of one run, once"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("pid", type=int, nargs="?", metavar="PID", help="the process id of `penstock run`")
        parser.add_argument("--json", action="store_true", help="print the current figures once, as one line of JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Watch until the run ends."""
        from penstock.observe.live import live_snapshot
        from penstock.observe.live.status_file import private_folder

        folder = private_folder()
        status = _find_run(folder, args.pid)
        if args.json:
            print(json.dumps({"unix_s": status.unix_s, **live_snapshot.as_json(status.snapshot)}))
            return 0
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _exit_by_signal)  # without a handler the terminal would not be restored
        try:
            _follow(folder / f"{status.snapshot.pid}.json")
        except KeyboardInterrupt:
            return 0
        print(f"penstock: run {status.snapshot.pid} is over")
        return 0


def _exit_by_signal(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _find_run(folder: Path, pid: int | None) -> StatusRecord:
    """Return the run with this pid, or the only run.

    Raises:
        PenstockError: there is none, or there are several.
    """
    from penstock.observe.live.status_file import active_runs

    runs = {status.snapshot.pid: status for status in active_runs(folder)}
    if pid is not None:
        if pid not in runs:
            raise PenstockError(f"process {pid} is not a run of yours; running: {_run_list(runs)}")
        return runs[pid]
    if not runs:
        raise PenstockError("you have no run on this machine; start one with `penstock run train.py`")
    first_ranks = [status for status in runs.values() if status.snapshot.rank == 0]
    if len(first_ranks) != 1 and len(runs) != 1:
        raise PenstockError(
            f"you have several runs; give one of their pids, as in `penstock watch {min(runs)}`: {_run_list(runs)}"
        )
    return first_ranks[0] if first_ranks else next(iter(runs.values()))


def _run_list(runs: dict[int, StatusRecord]) -> str:
    texts = (f"{pid} ({' '.join(status.snapshot.command)})" for pid, status in runs.items())
    return ", ".join(texts) or "none"


def _follow(file: Path) -> None:
    """Show the run until its process or its status file is gone."""
    from penstock.observe.live import live_text
    from penstock.observe.live.display import Display
    from penstock.observe.live.status_file import read_status
    from penstock.observe.live.terminal import StatusRows

    out = sys.stdout.fileno()
    display = Display(out) if StatusRows.fits(out) else None
    try:
        pidfd = os.pidfd_open(int(file.stem))
    except ProcessLookupError:
        return
    end = select.poll()
    end.register(pidfd, select.POLLIN)
    try:
        while (status := read_status(file)) is not None:
            if display is not None:
                display.show(status)
            else:
                print(live_text.progress_line(status.snapshot), flush=True)
            if end.poll(1000 * (_DRAW_PERIOD_S if display is not None else _LINE_PERIOD_S)):
                return
    finally:
        os.close(pidfd)
        if display is not None:
            display.close()
