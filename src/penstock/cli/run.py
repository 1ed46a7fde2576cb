"""`penstock run`."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.core.errors import PenstockError


class Run:
    """Run a training script, unedited, with penstock's DataLoader in place of torch's.

    A panel in the terminal's last rows shows progress, samples per second, the share of time the step waited for
    data, what workers do and memory; elsewhere a line comes every five seconds. At the end there is a short report,
    report.html and run.json. Exit code and traceback are the script's own. `penstock watch` looks on from another
    terminal. Under torchrun (`torchrun --nproc-per-node 2 -m penstock run train.py`) there is one report for all ranks.

    --tune: loaders find their number of workers while the script runs. Where samples draw random numbers, a loader
    keeps the script's number in its first epoch; where the script asks for none, the draws are then a worker's.
    """

    name = "run"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.usage = "penstock run [-h] [options] (script.py | -m module) [args ...]"
        parser.add_argument("--quiet", action="store_true", help="show neither the panel nor the report")
        parser.add_argument("--tune", action="store_true", help="let loaders find their number of workers")
        parser.add_argument(
            "--distributed",
            action="store_true",
            help="under torchrun: loaders that shuffle, and have no sampler, share out their samples over the ranks",
        )
        parser.add_argument(
            "--json",
            type=Path,
            default=Path("run.json"),
            metavar="FILE",
            help="where the run is kept (default: %(default)s)",
        )
        parser.add_argument(
            "--html",
            type=Path,
            default=Path("report.html"),
            metavar="FILE",
            help="where its report is written, to be looked at in a browser (default: %(default)s)",
        )
        parser.add_argument(
            "--trace",
            type=Path,
            metavar="FILE",
            help="record what happens to each batch, for Perfetto; lines up with torch.profiler's trace",
        )
        parser.add_argument(
            "--prometheus",
            type=int,
            metavar="PORT",
            help="serve live numbers on this machine's http://127.0.0.1:PORT/metrics; 0 for any free port",
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
        from penstock.launch import Outputs, run

        command = ["-m", *args.module] if args.module is not None else args.command
        if not command:
            raise PenstockError("nothing to run: give a script, as in `penstock run train.py`")
        outputs = Outputs(
            json_file=args.json.absolute(),
            html_file=args.html.absolute(),
            trace_file=args.trace and args.trace.absolute(),
            prometheus_port=args.prometheus,
            quiet=args.quiet,
        )
        return run(command, outputs, tune=args.tune, baseline=args.baseline, distributed=args.distributed)
