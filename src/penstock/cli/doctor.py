"""`penstock doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from penstock.cli.named import named
from penstock.core.errors import PenstockError


class Doctor:
    """Say where a loop's time goes, what the one bottleneck is, and which line to change.

    The name stands for a DataLoader (torch's or penstock's); a function that returns one; a pair (loader, step), or a
    function that returns one, where step(batch) is the training step; or a function that runs a training loop: it is
    called, its first loop over a DataLoader is examined, and it is ended from inside of that loop when enough has been
    seen. Functions take no arguments. Nothing needs to be edited.

    Storage, decoding, transforms, collate, transport, transfer and step are measured apart. Each "what if" is tried in
    the loop itself, by turns with the loop as it is; where the spread covers the difference, the answer is that it
    cannot be told.
    Samples are really made, and steps are really taken.

    --transfer: what it takes to move a batch to the device: pageable, pinned and slot memory, blocking or not, ahead
    of the step or in front of it. With no accelerator, host copies only.

    The exit code is 0; with --check, 1 when there is something to change; 2 when there was nothing to examine.
    """

    name = "doctor"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("loop", nargs="?", metavar="module:name", help="as in train:main; looked for here first")
        parser.add_argument("--seconds", type=float, default=20.0, help="about how long to take (default: %(default)s)")
        parser.add_argument("--check", action="store_true", help="exit with 1 when there is something to change")
        parser.add_argument("--transfer", action="store_true", help="measure the moves of a batch instead")
        parser.add_argument(
            "--shape", default="64,3,224,224", metavar="N,...", help="of that batch (default: %(default)s)"
        )
        parser.add_argument("--dtype", default="float32", help="of that batch, as torch says it (default: %(default)s)")
        parser.add_argument("--device", help="cuda, cuda:1, sim, cpu ...; the accelerator that is here by default")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Measure and print."""
        if args.transfer:
            return _transfer(args)
        if args.loop is None:
            raise PenstockError("nothing to examine; name a loop or a loader, as in train:main, or say --transfer")
        if args.seconds <= 0:
            raise PenstockError(f"--seconds {args.seconds:g} is no time to measure in; 20 is usual")
        return _examine(args)


def _examine(args: argparse.Namespace) -> int:
    from penstock.observe.diagnose import diagnose
    from penstock.observe.doctor.examine import examine
    from penstock.observe.doctor.rendering import as_json, render

    with contextlib.redirect_stdout(sys.stderr):  # what the program prints is not part of the answer
        found = examine(named(args.loop), name=args.loop, seconds=args.seconds)
    diagnosis = diagnose(found)
    if args.json:
        print(json.dumps(as_json(found, diagnosis), indent=2, default=repr))
    else:
        print(render(found, diagnosis), end="")
    return 1 if args.check and (diagnosis.findings or diagnosis.verdict.name != "healthy") else 0


def _transfer(args: argparse.Namespace) -> int:
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
