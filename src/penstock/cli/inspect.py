"""`penstock inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.convert import options_of
from penstock.core.errors import ExtraError

if TYPE_CHECKING:
    from penstock.feed.inspect import Inspection

_COLUMNS = 100
_DRAWN = 4


class Inspect:
    """Say what a data set holds: fields, shapes, counts, sizes, some samples, and how fast it is read here.

    PATH is what `penstock.open` takes: a folder, a file, a URL, braces, wildcards. Where samples have images and the
    terminal has colours, they are drawn; --picture writes them to a file.

    The read speed is measured in one thread, in order and then at random. What the machine has read before comes from
    its page cache: the first inspection after a restart tells about the disk.
    """

    name = "inspect"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("path", metavar="PATH", help="what to look at")
        parser.add_argument("--format", help="where the name does not tell it")
        parser.add_argument("--samples", type=int, default=3, metavar="N", help="to show (default: %(default)s)")
        parser.add_argument(
            "--seconds",
            type=float,
            default=2.0,
            metavar="S",
            help="to measure the read speed for, in each order; 0 for not at all (default: %(default)s)",
        )
        parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="the format's own")
        parser.add_argument("--picture", type=Path, metavar="FILE", help="write the samples' images to one, as a PNG")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Look and print."""
        from penstock.feed.inspect import inspect
        from penstock.feed.inspect.text import render

        found = inspect(
            args.path,
            format=args.format,
            samples=args.samples,
            seconds=args.seconds,
            options=options_of(args.option),
        )
        if args.picture is not None:
            _save(found, args.picture)
        if args.json:
            print(json.dumps(found.to_json(), indent=2))
            return 0
        print(render(found), end="")
        if args.picture is None and sys.stdout.isatty():
            _draw(found)
        return 0


def _save(found: Inspection, path: Path) -> None:
    """Write the samples' images to a file."""
    from penstock.feed.inspect.picture import contact_sheet, images_of, save

    images = images_of(found.shown)
    if not images:
        print("penstock: no sample has an image, so no picture is written", file=sys.stderr)
        return
    save(contact_sheet(images), str(path))
    print(f"penstock: the samples' images are in {path}", file=sys.stderr)


def _draw(found: Inspection) -> None:
    """Draw the first images in the terminal, two pixels to a character, if it has the colours, and Pillow is there."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    from penstock.feed.inspect.picture import contact_sheet, half_blocks, images_of

    console = Console()
    if console.color_system not in ("256", "truecolor"):
        return
    try:
        images = images_of(found.shown)[:_DRAWN]
        rows = half_blocks(contact_sheet(images, columns=len(images)), min(console.width, _COLUMNS)) if images else []
    except ExtraError:
        return
    for row in rows:
        line = Text()
        for above, below in row:
            line.append("▀", Style.parse(f"rgb({','.join(map(str, above))}) on rgb({','.join(map(str, below))})"))
        console.print(line)
