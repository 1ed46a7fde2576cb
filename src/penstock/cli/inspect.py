"""`penstock inspect`."""

from __future__ import annotations

import argparse
import json
import sys

from penstock.cli.option_values import parse_options
from penstock.core.urls import shown


class Inspect:
    """Show what a data set contains: fields, shapes, counts, sizes, some samples, and what is left out.

    PATH is anything that `penstock.open` takes: a folder, a file, a URL, braces, wildcards.
    """

    name = "inspect"
    examples = (
        ("penstock inspect train.h5", "fields and some samples"),
        ("penstock inspect s3://bucket/train/ --samples 1 --json", "for other programs"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("path", metavar="PATH", help="the data set")
        parser.add_argument("--format", metavar="FORMAT", help="its format, if the name does not determine it")
        parser.add_argument(
            "--samples", type=int, default=3, metavar="N", help="number of samples to show (default: %(default)s)"
        )
        parser.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the format; repeatable"
        )
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Inspect and print."""
        print(f"penstock: reading {shown(args.path)}", file=sys.stderr, flush=True)
        from penstock.data.inspect import inspect
        from penstock.data.inspect.inspection import render

        found = inspect(
            args.path,
            format=args.format,
            samples=args.samples,
            options=parse_options(args.option),
        )
        if args.json:
            print(json.dumps(found.to_json(), indent=2))
        else:
            print(render(found), end="")
        return 0
