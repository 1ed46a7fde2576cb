"""`penstock plan`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from penstock.cli.named import called
from penstock.core.errors import PenstockError


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

        found = plan(*_step_of(args.function), budget=args.budget)
        print(json.dumps(found.to_json(), indent=2) if args.json else found.render().rstrip())
        return 0 if found.choice is not None else 1


def _step_of(name: str) -> tuple[Any, ...]:
    step = called(name)
    if not isinstance(step, tuple) or len(step) not in (3, 4):
        raise PenstockError(f"{name} must return (model, loss_fn, batch, optimizer), not {type(step).__name__}")
    return step
