"""`penstock plan`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from penstock.cli.import_object import call_object, import_object
from penstock.cli.progress_line import ProgressLine
from penstock.core.errors import PenstockError
from penstock.core.units import to_nbytes
from penstock.core.urls import redact_all, shown

_TEMPLATE = """\
penstock: which step of {module}? Add a function that makes one, and run: penstock plan {module}:step --budget 24GiB

def step():
    model = Model()  # under `with torch.device("meta"):`, for one that is larger than memory
    optimizer = torch.optim.AdamW(model.parameters())
    batch = next(iter(loader))

    def loss_fn(model, batch):  # the sum of losses, and how many they are
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    return model, loss_fn, batch, optimizer"""


class Plan:
    """Predict the peak memory of a training step, and how to fit it into a GPU. Needs no GPU.

    FUNCTION takes no arguments and returns (model, loss_fn, batch, optimizer), as for `penstock.plan`. loss_fn(model,
    batch) returns the sum of the losses and their count. The output lists each way to run the step with its peak memory
    by role: in micro-batches, with checkpointed blocks, or with their inputs offloaded to the host. With --ranks, it is
    the plan of one rank of a sharded model, and the batch is that rank's.

    The exit code is 0; 1 if nothing fits; 2 after an error.
    """

    name = "plan"
    examples = (
        ("penstock plan train:step --budget 24GiB", "does it fit, and how"),
        ("penstock plan train:step --budget 80GiB --ranks 8 --shard fsdp2", "one rank of eight"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument(
            "function",
            metavar="FUNCTION",
            help="a function as module:function, such as train:step; the current folder is searched first",
        )
        parser.add_argument(
            "--budget", help="the memory that the step may use, as in 24GiB; by default what the GPU has"
        )
        parser.add_argument("--ranks", type=int, default=1, metavar="N", help="plan one rank of so many")
        parser.add_argument(
            "--shard",
            default="fsdp2",
            metavar="HOW",
            help="how ranks share parameters: fsdp2 (the default), ddp, or module:function of (model, mesh)",
        )
        parser.add_argument(
            "--forward-only", action="store_true", help="plan evaluation: loss_fn returns any output, without gradients"
        )
        parser.add_argument(
            "--allow-batch-dependent", action="store_true", help="also cut batches of a model with BatchNorm"
        )
        parser.add_argument("--all", action="store_true", help="show all ways to run the step, not the nearest alone")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Print the plan."""
        if ":" not in args.function:
            module = args.function.removesuffix(".py")
            print(_TEMPLATE.format(module=module), file=sys.stderr)
            return 2
        if args.budget is not None:
            to_nbytes("--budget", args.budget, least=1)  # before the program runs, which may take minutes
        print(f"penstock: importing torch, and then {args.function}", file=sys.stderr, flush=True)
        from penstock.memory.planning.planner import plan, to_budget

        budget = to_budget(args.budget)
        step = _training_step(args.function)
        with ProgressLine() as line:
            plans = plan(
                *step,
                budget=budget,
                progress=lambda done, total: line.show(f"{done} of {total} steps planned"),
                ranks=args.ranks,
                shard=import_object(args.shard) if ":" in args.shard else args.shard,
                forward_only=args.forward_only,
                allow_batch_dependent=args.allow_batch_dependent,
            )
        print(
            json.dumps(redact_all(plans.to_json()), indent=2)
            if args.json
            else shown(plans.render(every=args.all).rstrip())
        )
        return 0 if plans.choice is not None else 1


def _training_step(name: str) -> tuple[Any, ...]:
    step = call_object(name)
    if not isinstance(step, tuple) or len(step) not in (3, 4):
        raise PenstockError(f"{name} must return (model, loss_fn, batch, optimizer), not {type(step).__name__}")
    return step
