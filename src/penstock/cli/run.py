"""`penstock run`."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.core.errors import PenstockError


class Run:
    """Run a training script, unedited, with penstock's DataLoader in place of torch's.

    A panel in the terminal's last rows shows progress, samples per second, the share of time the step waited for
    data, what workers do and memory; elsewhere a line comes every five seconds. At the end there is a short report, and
    run.json. The exit code and the traceback are the script's own. `penstock watch` looks on from another terminal.
    Under torchrun (`torchrun --nproc-per-node 2 -m penstock run train.py`) there is one report for all ranks.
    """

    name = "run"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.usage = "penstock run [-h] [--quiet] [--json FILE] [--baseline] (script.py | -m module) [args ...]"
        parser.add_argument("--quiet", action="store_true", help="show neither the panel nor the report")
        parser.add_argument(
            "--json",
            type=Path,
            default=Path("run.json"),
            metavar="FILE",
            help="where the run is kept (default: %(default)s)",
        )
        parser.add_argument(
            "--baseline",
            action="store_true",
            help="run a short stretch with torch's own loader first, and say what is gained; what the script does at "
            "its start is then done twice",
        )
        parser.add_argument(
            "-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module, as python -m does"
        )
        parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")

    def run(self, args: argparse.Namespace) -> int:
        """Run the script."""
        from penstock.launch import run

        command = ["-m", *args.module] if args.module is not None else args.command
        if not command:
            raise PenstockError("nothing to run: give a script, as in `penstock run train.py`")
        return run(command, json_file=args.json.absolute(), quiet=args.quiet, baseline=args.baseline)
