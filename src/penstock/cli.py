"""The `penstock` command. Each verb is a class: its docstring is its help."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock import __version__
from penstock.core.errors import PenstockError


class Verb(Protocol):
    """One thing the command can do."""

    name: str

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code."""
        ...


class Run:
    """Run a training script, unedited, with penstock's DataLoader in place of torch's.

    A live line shows progress, samples per second and the share of time the step waited for data. At the end there
    is a short report, and run.json. The exit code and the traceback are the script's own.
    """

    name = "run"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.usage = "penstock run [-h] [--quiet] [--json FILE] (script.py | -m module) [args ...]"
        parser.add_argument("--quiet", action="store_true", help="show neither the live line nor the report")
        parser.add_argument(
            "--json",
            type=Path,
            default=Path("run.json"),
            metavar="FILE",
            help="where the run is kept (default: %(default)s)",
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
        return run(command, json_file=args.json.absolute(), quiet=args.quiet)


class Report:
    """Print a saved run again."""

    name = "report"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("file", type=Path, help="a run.json")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Print the run."""
        from penstock.observe import record, report

        saved = record.load(args.file)
        print(json.dumps(record.as_json(saved), indent=2, default=repr) if args.json else report.render(saved).rstrip())
        return 0


class Doctor:
    """Measure this machine, and say in words what pays on it.

    --transfer: what it takes to move a batch to the device: pageable, pinned and slot memory, blocking or not, ahead
    of the step or in front of it. With no accelerator, host copies only.
    """

    name = "doctor"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("--transfer", action="store_true", required=True, help="measure the moves of a batch")
        parser.add_argument(
            "--shape", default="64,3,224,224", metavar="N,...", help="of the batch (default: %(default)s)"
        )
        parser.add_argument("--dtype", default="float32", help="of the batch, as torch says it (default: %(default)s)")
        parser.add_argument("--device", help="cuda, cuda:1, sim, cpu ...; the accelerator that is here by default")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Measure and print."""
        import torch

        from penstock.device import device_of
        from penstock.observe.transfer import measure_transfer

        try:
            size = tuple(int(number) for number in args.shape.split(","))
            dtype = getattr(torch, args.dtype)
            if min(size) < 1 or not isinstance(dtype, torch.dtype):
                raise ValueError
        except (ValueError, AttributeError) as error:
            raise PenstockError(
                f"--shape {args.shape} --dtype {args.dtype} is no batch; give sizes as in 64,3,224,224 and a dtype as "
                "in float32"
            ) from error
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        report = measure_transfer(size, dtype, device_of(args.device or here or "cpu"))
        print(json.dumps(report.to_json(), indent=2) if args.json else report.render().rstrip())
        return 0


class Plan:
    """Predict what of a training step fits in a GPU's memory, without one.

    The function takes nothing and returns (model, loss_fn, batch, optimizer), as for `penstock.plan`: loss_fn(model,
    batch) gives the sum of the losses and their count. Each way to run the step is listed with its peak by role: in
    micro-batches, with checkpointed blocks, with their inputs offloaded.
    """

    name = "plan"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("function", metavar="module:function", help="as in train:step; looked for here first")
        parser.add_argument("--budget", required=True, help="the memory there is, as in 24GiB")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Plan and print; 1 when nothing fits."""
        from penstock.memory.planner import plan

        found = plan(*_called(args.function), budget=args.budget)
        print(json.dumps(found.to_json(), indent=2) if args.json else found.render().rstrip())
        return 0 if found.choice is not None else 1


def _called(name: str) -> tuple[Any, ...]:
    """Return what the function named "module:function" returns."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PenstockError(f"there is no function {name!r} ({error}); name one as in train:step") from error
    step = made()
    if not isinstance(step, tuple) or len(step) not in (3, 4):
        raise PenstockError(f"{name} must return (model, loss_fn, batch, optimizer), not {type(step).__name__}")
    return step


VERBS: tuple[Verb, ...] = (Run(), Doctor(), Plan(), Report())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock", description="Feed a PyTorch program at the speed of its machine, and fit it into its memory."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in VERBS:
        text = inspect.getdoc(verb) or ""
        sub = verbs.add_parser(
            verb.name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.options(sub)
        sub.set_defaults(verb=verb)
    args = parser.parse_args(argv)
    try:
        code: int = args.verb.run(args)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return code
