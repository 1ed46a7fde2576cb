"""`penstock doctor`."""

from __future__ import annotations

import argparse
import json

from penstock.core.errors import PenstockError


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
