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
    from penstock.observe.beacon import Sighting

_LOOK_S = 0.5
_PLAIN_S = 5.0


class Watch:
    """Look at a run that is under way, from another terminal.

    Without a pid: the only run of this user's on this machine. Ctrl-C ends the looking, not the run. Where there is no
    terminal, a line comes every five seconds.
    """

    name = "watch"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("pid", type=int, nargs="?", help="the process that `penstock run` is")
        parser.add_argument("--json", action="store_true", help="print its numbers once, as one line of JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Watch until the run ends."""
        from penstock.observe import pulse
        from penstock.observe.beacon import private_folder

        folder = private_folder()
        sighting = _chosen(folder, args.pid)
        if args.json:
            print(json.dumps({"at": sighting.at, **pulse.as_json(sighting.pulse)}))
            return 0
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)  # else the terminal would not be given back
        try:
            _follow(folder / f"{sighting.pulse.pid}.json")
        except KeyboardInterrupt:
            return 0
        print(f"penstock: run {sighting.pulse.pid} is over")
        return 0


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _chosen(folder: Path, pid: int | None) -> Sighting:
    """Return the run with this pid, or the only one.

    Raises:
        PenstockError: there is none, or several.
    """
    from penstock.observe.beacon import living

    runs = {sighting.pulse.pid: sighting for sighting in living(folder)}
    if pid is not None:
        if pid not in runs:
            raise PenstockError(f"process {pid} is no run under way of yours; there are {_listed(runs)}")
        return runs[pid]
    if not runs:
        raise PenstockError("no run of yours is under way; start one with `penstock run train.py`")
    leading = [sighting for sighting in runs.values() if sighting.pulse.rank == 0]
    if len(leading) != 1 and len(runs) != 1:
        raise PenstockError(
            f"several runs are under way; name one, as in `penstock watch {min(runs)}`: {_listed(runs)}"
        )
    return leading[0] if leading else next(iter(runs.values()))


def _listed(runs: dict[int, Sighting]) -> str:
    words = (f"{pid} ({' '.join(sighting.pulse.command)})" for pid, sighting in runs.items())
    return ", ".join(words) or "none"


def _follow(file: Path) -> None:
    """Show the run until its file is gone or its process is."""
    from penstock.observe import lines
    from penstock.observe.beacon import read
    from penstock.observe.display import Display
    from penstock.observe.terminal import StatusRows

    out = sys.stdout.fileno()
    display = Display(out) if StatusRows.fits(out) else None
    try:
        pidfd = os.pidfd_open(int(file.stem))
    except ProcessLookupError:
        return
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    try:
        while (sighting := read(file)) is not None:
            if display is not None:
                display.show(sighting)
            else:
                print(lines.progress(sighting.pulse), flush=True)
            if ended.poll(1000 * (_LOOK_S if display is not None else _PLAIN_S)):
                return
    finally:
        os.close(pidfd)
        if display is not None:
            display.close()
