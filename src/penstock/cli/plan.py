"""`penstock plan`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.cli.import_object import call_object, import_object
from penstock.core.errors import PenstockError
from penstock.core.units import to_nbytes
from penstock.core.urls import redact_all, shown

_PROGRESS_S = 5.0
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
        with _progress_bar() as progress:
            plans = plan(
                *step,
                budget=budget,
                progress=progress,
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


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Yield what shows the number of steps on stderr: as a bar in a terminal, else as a line every few seconds."""
    if not sys.stderr.isatty():
        yield _print_progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("planning"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_progress() -> Callable[[int, int], None]:
    last_s = time.monotonic()

    def print_if_due(done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _PROGRESS_S:
            last_s = time.monotonic()
            print(f"penstock: {done} of {total} steps planned", file=sys.stderr, flush=True)

    return print_if_due


def _training_step(name: str) -> tuple[Any, ...]:
    step = call_object(name)
    if not isinstance(step, tuple) or len(step) not in (3, 4):
        raise PenstockError(f"{name} must return (model, loss_fn, batch, optimizer), not {type(step).__name__}")
    return step
