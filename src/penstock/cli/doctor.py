"""`penstock doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from penstock.cli.import_object import import_object
from penstock.core.errors import PenstockError


class Doctor:
    """Find the bottleneck of a training loop, and the line to change.

    LOOP is a DataLoader (torch's or penstock's); a function that returns one; a pair (loader, step), or a function that
    returns one, where step(batch) is the training step; or a function that runs a training loop: the doctor calls it,
    examines its first loop over a DataLoader, and ends it inside of that loop. Functions take no arguments. The code
    needs no changes. The doctor loads real samples and runs real training steps.

    Storage, decoding, transforms, collate, transport, copies to the device and the step are measured separately. Each
    proposed change is tried in the loop itself, interleaved with the unchanged loop; a difference within the spread of
    the measurement is reported as such.

    --transfer: measure only the copies of a batch to the device: from pageable, pinned and slot memory, blocking or
    not, ahead of the step or in front of it. Without an accelerator, only copies within the host.

    The exit code is 0; with --check, 1 if there is something to change; 2 after an error.
    """

    name = "doctor"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument(
            "loop",
            nargs="?",
            metavar="LOOP",
            help="module:object, as in train:main; the current folder is searched first",
        )
        parser.add_argument(
            "--seconds", type=float, default=20.0, metavar="S", help="how long to measure (default: %(default)s)"
        )
        parser.add_argument("--check", action="store_true", help="exit with 1 if there is something to change")
        parser.add_argument("--transfer", action="store_true", help="measure the copies of a batch instead")
        parser.add_argument(
            "--shape", default="64,3,224,224", metavar="N,...", help="shape of that batch (default: %(default)s)"
        )
        parser.add_argument("--dtype", default="float32", help="torch dtype of that batch (default: %(default)s)")
        parser.add_argument("--device", help="cuda, cuda:1, sim, cpu ... (default: the accelerator)")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Measure and print."""
        if args.transfer:
            return _transfer(args)
        if args.loop is None:
            raise PenstockError("nothing to examine; give a loop or a loader, as in train:main, or --transfer")
        if args.seconds <= 0:
            raise PenstockError(f"--seconds must be positive, got {args.seconds:g}; 20 is usual")
        return _examine(args)


def _examine(args: argparse.Namespace) -> int:
    from penstock.observe.doctor.causes import diagnose
    from penstock.observe.doctor.examine import examine
    from penstock.observe.doctor.rendering import as_json, render

    with contextlib.redirect_stdout(sys.stderr):  # the program's output is not part of the result
        found = examine(import_object(args.loop), name=args.loop, seconds=args.seconds)
    diagnosis = diagnose(found)
    if args.json:
        print(json.dumps(as_json(found, diagnosis), indent=2, default=repr))
    else:
        print(render(found, diagnosis), end="")
    return 1 if args.check and (diagnosis.findings or diagnosis.verdict.name != "healthy") else 0


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
