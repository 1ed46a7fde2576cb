"""`penstock run`."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.core.errors import PenstockError


class Run:
    """Run an unedited training script with penstock's DataLoader in place of torch's.

    A panel in the terminal's last rows shows progress, samples per second, how long the step waited for data, the
    workers and memory; without a terminal, a line is printed every five seconds. At the end it prints a short report
    and writes report.html and run.json. The exit code and traceback are the script's own. `penstock watch` shows the
    panel in another terminal. Under torchrun (`torchrun --nproc-per-node 2 -m penstock run train.py`) there is one
    report for all ranks.

    --tune: loaders choose their number of workers while the script runs. If samples draw random numbers, a loader keeps
    the script's number of workers during its first epoch. If the script uses no workers, random numbers then come from
    a worker's generator.
    """

    name = "run"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.usage = "penstock run [-h] [options] [--] (script.py | -m MODULE) [args ...]"
        parser.add_argument("--quiet", action="store_true", help="show neither the panel nor the report")
        parser.add_argument("--tune", action="store_true", help="let loaders choose their number of workers")
        parser.add_argument(
            "--distributed",
            action="store_true",
            help="under torchrun: shard the samples of loaders that shuffle and have no sampler over the ranks",
        )
        parser.add_argument(
            "--json",
            type=Path,
            default=Path("run.json"),
            metavar="FILE",
            help="where to write the run as data (default: %(default)s)",
        )
        parser.add_argument(
            "--html",
            type=Path,
            default=Path("report.html"),
            metavar="FILE",
            help="where to write the report for a browser (default: %(default)s)",
        )
        parser.add_argument(
            "--trace",
            type=Path,
            metavar="FILE",
            help="write what happens to each batch, for Perfetto; on the time base of torch.profiler's traces",
        )
        parser.add_argument(
            "--prometheus",
            type=int,
            metavar="PORT",
            help="serve live metrics at http://127.0.0.1:PORT/metrics; 0 for any free port",
        )
        parser.add_argument(
            "--baseline",
            action="store_true",
            help="run the beginning with torch's own loader first, and report the speedup; whatever the script does at "
            "its beginning happens twice",
        )
        parser.add_argument(
            "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does"
        )
        parser.add_argument(
            "command", nargs=argparse.REMAINDER, metavar="script.py", help="the script, and its arguments"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run the script."""
        from penstock.launch import Outputs, run

        command = _command(args.module, args.command)
        if not command:
            raise PenstockError("nothing to run; give a script, as in `penstock run train.py`")
        outputs = Outputs(
            json_file=args.json.absolute(),
            html_file=args.html.absolute(),
            trace_file=args.trace and args.trace.absolute(),
            prometheus_port=args.prometheus,
            quiet=args.quiet,
        )
        return run(command, outputs, tune=args.tune, baseline=args.baseline, distributed=args.distributed)


def _command(module: list[str] | None, rest: list[str]) -> list[str]:
    """Return what to run: `[script, *args]` or `["-m", name, *args]`.

    A "--" before it ends penstock's own options; a later one is the program's, as for `python`. argparse ends the
    arguments of -m there, and takes the "--" and what follows for the command.

    >>> _command(None, ["--", "-m", "pytest", "-x"])
    ['-m', 'pytest', '-x']
    >>> _command(["pytest"], ["--", "tests"])
    ['-m', 'pytest', '--', 'tests']
    """
    if module is not None:
        return ["-m", *module, *rest]
    return rest[1:] if rest[:1] == ["--"] else rest
