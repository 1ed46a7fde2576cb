"""`penstock tune`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings

from penstock.cli.import_object import import_object
from penstock.core.errors import OptionError
from penstock.core.urls import redact_all, shown


class Tune:
    """Find the fastest DataLoader settings for a training loop, by short trials.

    LOADER is a DataLoader (torch's or penstock's), a function that returns one, or a pair (loader, step). The step is a
    function that takes a batch; without one, --step-ms is the time of a step on a device. Among equally fast settings,
    the one with the fewest workers and the least memory wins.
    """

    name = "tune"
    examples = (
        ("penstock tune train:loader --step train:step", "time trials with your training step"),
        ("penstock tune train:loader --step-ms 40 --ram 8GiB", "assume a step of 40 ms, and limit memory"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument(
            "object",
            metavar="LOADER",
            help="a loader as module:object, such as train:loader; the current folder is searched first",
        )
        step = parser.add_mutually_exclusive_group()
        step.add_argument("--step", metavar="STEP", help="the training step as module:function; it takes a batch")
        step.add_argument("--step-ms", type=float, metavar="X", help="the time of a step on a device, in milliseconds")
        parser.add_argument(
            "--ram", metavar="SIZE", help="the most memory that workers and batches may use, as in 4GiB"
        )
        parser.add_argument(
            "--cpus",
            type=int,
            metavar="N",
            help="the most cores that workers may keep busy (default: all usable cores)",
        )
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Search and print."""
        _print_note(f"importing torch, and then {args.object}; the trials take 10 to 30 s")
        from penstock.core.units import to_nbytes
        from penstock.tune.search import tune
        from penstock.tune.tuned_loop import resolve_tuned_loop

        ram_nbytes = to_nbytes("--ram", args.ram) if args.ram is not None else None
        if args.step_ms is not None and args.step_ms < 0:
            raise OptionError(f"--step-ms must be 0 or more milliseconds, got {args.step_ms:g}")
        step = import_object(args.step) if args.step is not None else None
        loop = resolve_tuned_loop(import_object(args.object), step=step, step_s=(args.step_ms or 0.0) / 1e3)
        with warnings.catch_warnings():  # torch's, on a number of workers that the search tries and reports itself
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            found = tune(loop, ram_nbytes=ram_nbytes, cpus=args.cpus, report=_print_note)
        print(json.dumps(redact_all(found.to_json()), indent=2) if args.json else shown(found.render().rstrip()))
        return 0


def _print_note(text: str) -> None:
    print(f"penstock: {shown(text)}", file=sys.stderr, flush=True)
