"""`penstock inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.option_values import parse_options
from penstock.core.errors import ExtraError

if TYPE_CHECKING:
    from penstock.data.inspect import Inspection

_COLUMNS = 100
_MAX_DRAWN = 4


class Inspect:
    """Show what a data set contains: fields, shapes, counts, sizes, some samples, and its read speed.

    PATH is anything that `penstock.open` takes: a folder, a file, a URL, braces, wildcards. Images in samples are drawn
    if the terminal has colours; --picture writes them to a file.

    The read speed is measured in one thread, in order and then at random. Files that were read before are in the page
    cache; only the first inspection after a restart measures the disk.
    """

    name = "inspect"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("path", metavar="PATH", help="the data set")
        parser.add_argument("--format", metavar="FORMAT", help="its format, if the name does not determine it")
        parser.add_argument(
            "--samples", type=int, default=3, metavar="N", help="number of samples to show (default: %(default)s)"
        )
        parser.add_argument(
            "--seconds",
            type=float,
            default=2.0,
            metavar="S",
            help="how long to measure the read speed in each order; 0 to skip it (default: %(default)s)",
        )
        parser.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the format; repeatable"
        )
        parser.add_argument("--picture", type=Path, metavar="FILE", help="write the samples' images to a PNG file")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Inspect and print."""
        from penstock.data.inspect import inspect
        from penstock.data.inspect.inspection import render

        found = inspect(
            args.path,
            format=args.format,
            samples=args.samples,
            seconds=args.seconds,
            options=parse_options(args.option),
        )
        if args.picture is not None:
            _save_images(found, args.picture)
        if args.json:
            print(json.dumps(found.to_json(), indent=2))
            return 0
        print(render(found), end="")
        if args.picture is None and sys.stdout.isatty():
            _draw_images(found)
        return 0


def _save_images(found: Inspection, path: Path) -> None:
    """Write the samples' images to a file."""
    from penstock.data.inspect.contact_sheet import contact_sheet, images_of, save

    images = images_of(found.examples)
    if not images:
        print("penstock: no sample has an image; no picture was written", file=sys.stderr)
        return
    save(contact_sheet(images), str(path))
    print(f"penstock: the samples' images are in {path}", file=sys.stderr)


def _draw_images(found: Inspection) -> None:
    """Draw the first images, two pixels per character, if the terminal has the colours and Pillow is installed."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    from penstock.data.inspect.contact_sheet import contact_sheet, half_blocks, images_of

    console = Console()
    if console.color_system not in ("256", "truecolor"):
        return
    try:
        images = images_of(found.examples)[:_MAX_DRAWN]
        rows = half_blocks(contact_sheet(images, columns=len(images)), min(console.width, _COLUMNS)) if images else []
    except ExtraError:
        return
    for row in rows:
        line = Text()
        for above, below in row:
            line.append("▀", Style.parse(f"rgb({','.join(map(str, above))}) on rgb({','.join(map(str, below))})"))
        console.print(line)
