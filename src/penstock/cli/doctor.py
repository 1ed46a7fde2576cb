"""`penstock doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict

from penstock.cli.examined_program import is_object, load_loop
from penstock.cli.import_object import print_own_traceback
from penstock.cli.run import command_of
from penstock.core.errors import PenstockError
from penstock.core.urls import redact_all, shown


class Doctor:
    """Find the bottleneck of a training loop, and the line to change.

    Give one of these; the code needs no changes:

    - a script (or -m and a module): the doctor runs it as `penstock run` does, examines its first training loop over a
      DataLoader, and ends the program inside that loop;
    - module:object, as in train:main: a DataLoader (torch's or penstock's), a function that returns one, a pair
      (loader, step), a function that returns such a pair, or a function that runs a training loop.

    step(batch) is the training step. Functions are called without arguments; arguments after `--` are the program's
    sys.argv. The doctor loads real samples and runs real training steps. It cuts other loops of the program short,
    such as a validation, so results that the program prints meanwhile cover only a part.

    The doctor measures samples, collate, transport, copies to the device and the step separately. Then it tries
    changes in the loop, interleaved with the unchanged loop. It states a gain if two rounds agree.

    --pid: look into a running Python program from outside, without stopping it. You need not have started it with
    penstock. The doctor shows how long its loop waits for batches, which lines of the dataset and of the step it runs,
    and which workers don't move. It tries no changes. This needs py-spy (penstock[doctor]).

    --transfer: measure only the copies of a batch to the device: from pageable, pinned and slot memory, blocking or
    not, ahead of the step or in front of it. Without an accelerator, it measures copies within the host.

    The exit code is 0; with --check, 1 if there is something to change (not if the measurements leave it open); 2 after
    an error.
    """

    name = "doctor"
    examples = (
        ("penstock doctor train.py", "examine the script's first training loop"),
        ("penstock doctor train:main -- --epochs 2", "examine a function; its sys.argv follows --"),
        ("penstock doctor --pid 4834", "look into a running program"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.usage = (
            "penstock doctor [-h] [options] (script.py [args ...] | -m MODULE [args ...] | module:object [-- args ...])"
        )
        _add_options(parser)
        parser.add_argument(
            "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does"
        )
        parser.add_argument(
            "command",
            nargs=argparse.REMAINDER,
            metavar="script.py",
            help="a script and its arguments; or module:object, as in train:main; the current folder is searched first",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Measure and print."""
        args.command = command_of(args.module, args.command)
        if args.command and is_object(args.command):
            args.command = _take_options(args)
        if args.transfer:
            return _transfer(args)
        if args.seconds <= 0:
            raise PenstockError(f"--seconds must be positive, got {args.seconds:g}; 16 is usual")
        if args.pid is not None:
            return _look_into(args)
        if not args.command:
            raise PenstockError(
                "nothing to examine; give a script, a loop or a loader as in train:main, --pid or --transfer"
            )
        return _examine(args)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=16.0, metavar="S", help="how long to measure (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if there is something to change")
    parser.add_argument("--pid", type=int, metavar="N", help="look into this running program instead")
    parser.add_argument("--transfer", action="store_true", help="measure the copies of a batch instead")
    parser.add_argument(
        "--shape", default="64,3,224,224", metavar="N,...", help="shape of that batch (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="float32", help="dtype of that batch, as torch names it (default: %(default)s)"
    )
    parser.add_argument("--device", help="device of that batch: cuda, cuda:1, sim, cpu ... (default: the accelerator)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _take_options(args: argparse.Namespace) -> list[str]:
    """Read the doctor's own options between module:object and "--" into `args`; return the command without them."""
    name, *rest = args.command
    end = rest.index("--") if "--" in rest else len(rest)
    parser = argparse.ArgumentParser(prog="penstock doctor module:object", allow_abbrev=False)
    _add_options(parser)
    parser.parse_args(rest[:end], namespace=args)
    return [name, *rest[end + 1 :]]


def _examine(args: argparse.Namespace) -> int:
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    name = " ".join(args.command[:2] if args.command[0] == "-m" else args.command[:1])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the program's output is not part of the result
            loop = load_loop(args.command)
            _say(f"importing torch, and then {name}; the measurements take about {args.seconds:.0f} s")
            from penstock.observe.doctor.causes import diagnose
            from penstock.observe.doctor.examine import examine
            from penstock.observe.doctor.rendering import as_json, render

            found = examine(loop, name=name, seconds=args.seconds, on_error=print_own_traceback, say=_say)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
    diagnosis = diagnose(found)
    if args.json:
        print(json.dumps(redact_all(as_json(found, diagnosis)), indent=2, default=repr))
    else:
        print(shown(render(found, diagnosis)), end="")
    return 1 if args.check and not diagnosis.is_healthy else 0


def _say(text: str) -> None:
    sys.stderr.write(f"penstock doctor: {text}\n")
    sys.stderr.flush()


def _look_into(args: argparse.Namespace) -> int:
    from penstock.observe.doctor.attached import render, summarize
    from penstock.observe.doctor.probes.process_stacks import sample_stacks

    if args.command or args.check:
        raise PenstockError("--pid looks into a program that is running; leave out the other program and --check")
    seen = summarize(sample_stacks(args.pid, args.seconds))
    text = json.dumps(redact_all(asdict(seen)), indent=2) + "\n" if args.json else shown(render(seen))
    print(text, end="")
    return 0


def _transfer(args: argparse.Namespace) -> int:
    import torch

    from penstock.device import device_of
    from penstock.observe.meters.transfer import measure_transfer

    try:
        shape = tuple(int(number) for number in args.shape.split(","))
        dtype = getattr(torch, args.dtype)
        if min(shape) < 1 or not isinstance(dtype, torch.dtype):
            raise ValueError
    except (ValueError, AttributeError) as error:
        raise PenstockError(
            f"--shape {args.shape} --dtype {args.dtype} is not a valid batch; give a shape such as 64,3,224,224 and a "
            "dtype such as float32"
        ) from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    report = measure_transfer(shape, dtype, device_of(args.device or accelerator or "cpu"))
    print(json.dumps(report.to_json(), indent=2) if args.json else report.render().rstrip())
    return 0
