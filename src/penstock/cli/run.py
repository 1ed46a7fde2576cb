"""`penstock run`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from penstock.core.errors import PenstockError


class Run:
    """Run an unedited training script with penstock's DataLoader in place of torch's.

    A panel in the terminal's last rows shows progress, samples per second, how long the step waited for data, the
    workers and memory. Without a terminal, penstock prints a line every five seconds. At the end it prints a short
    report, and writes report.html and run.json to a new folder in penstock-runs. The exit code and the traceback are
    the script's.

    Put penstock's options before the script. Under torchrun (`torchrun --nproc-per-node 2 -m penstock run train.py`)
    you get one report for all ranks.

    --tune: loaders choose their number of workers while the script runs. The report shows the script's own number,
    too. If samples may depend on their worker, as random numbers do, the number stays the same during an epoch. In the
    first epoch it is the script's, or more if the first batch waits. If the script uses no workers, random numbers
    then come from a worker's generator.
    """

    name = "run"
    examples = (
        ("penstock run train.py --epochs 2", "options after the script are the script's"),
        ("penstock run --baseline train.py", "report the speedup over torch's loader"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.usage = "penstock run [-h] [options] [--] (script.py | -m MODULE) [args ...]"
        parser.add_argument("--quiet", action="store_true", help="show neither the panel nor the report")
        parser.add_argument("--tune", action="store_true", help="let loaders choose their number of workers")
        parser.add_argument(
            "--json",
            type=Path,
            metavar="FILE",
            help="where to write the run as data (default: run.json in a new folder of penstock-runs)",
        )
        parser.add_argument(
            "--html",
            type=Path,
            metavar="FILE",
            help="where to write the report for a browser (default: report.html, next to run.json)",
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
        from penstock.core.ranks import Ranks
        from penstock.launch import Outputs, run
        from penstock.launch.run_folder import run_folder

        command = command_of(args.module, args.command)
        if not command:
            raise PenstockError("nothing to run; give a script, as in `penstock run train.py`")
        for option, file in (("--json", args.json), ("--html", args.html), ("--trace", args.trace)):
            _check_folder(option, file)
        folder = run_folder(command, Ranks.of(os.environ, os.getppid())).absolute()
        outputs = Outputs(
            folder=folder,
            json_file=args.json.absolute() if args.json else folder / "run.json",
            html_file=args.html.absolute() if args.html else folder / "report.html",
            trace_file=args.trace and args.trace.absolute(),
            prometheus_port=args.prometheus,
            quiet=args.quiet,
        )
        return run(command, outputs, tune=args.tune, baseline=args.baseline)


def _check_folder(option: str, file: Path | None) -> None:
    """Raise an error before the program runs for hours, where its file could not be written at the end.

    Raises:
        PenstockError: there is no such folder, or `file` is one.
    """
    if file is None:
        return
    if file.is_dir():
        raise PenstockError(f"{option} needs a file, and {file} is a folder; give a file in it")
    if not file.absolute().parent.is_dir():
        raise PenstockError(f"{option} {file}: there is no folder {file.parent}; make it, or give another file")


def command_of(module: list[str] | None, rest: list[str]) -> list[str]:
    """Return what to run: `[script, *args]` or `["-m", name, *args]`.

    A "--" before it ends penstock's own options; a later one is the program's, as for `python`. argparse ends the
    arguments of -m there, and takes the "--" and what follows for the command.

    >>> command_of(None, ["--", "-m", "pytest", "-x"])
    ['-m', 'pytest', '-x']
    >>> command_of(["pytest"], ["--", "tests"])
    ['-m', 'pytest', '--', 'tests']
    """
    if module is not None:
        return ["-m", *module, *rest]
    return rest[1:] if rest[:1] == ["--"] else rest
