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
    import numpy as np

    from penstock.feed.inspect import Inspection

_COLUMNS = 100


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
        sheet = _sheet(found, is_needed=args.picture is not None)
        if args.picture is not None:
            _save(sheet, args.picture)
        if args.json:
            print(json.dumps(found.to_json(), indent=2))
            return 0
        print(render(found), end="")
        if sheet is not None and args.picture is None and sys.stdout.isatty():
            _draw(sheet)
        return 0


def _sheet(found: Inspection, *, is_needed: bool) -> np.ndarray | None:
    """Return the samples' images as one; None where there are none, or Pillow is missing and nobody asked for it."""
    from penstock.feed.inspect.picture import contact_sheet, images_of

    try:
        images = images_of(found.shown)
        return contact_sheet(images) if images else None
    except ExtraError:
        if is_needed:
            raise
        return None


def _save(sheet: np.ndarray | None, path: Path) -> None:
    from penstock.feed.inspect.picture import save

    if sheet is None:
        print("penstock: no sample has an image, so no picture is written", file=sys.stderr)
        return
    save(sheet, str(path))
    print(f"penstock: the samples' images are in {path}", file=sys.stderr)


def _draw(sheet: np.ndarray) -> None:
    """Draw an image in the terminal, two pixels to a character."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    from penstock.feed.inspect.picture import half_blocks

    console = Console()
    if console.color_system not in ("256", "truecolor"):
        return
    for row in half_blocks(sheet, min(console.width, _COLUMNS)):
        line = Text()
        for above, below in row:
            line.append("▀", Style.parse(f"rgb({','.join(map(str, above))}) on rgb({','.join(map(str, below))})"))
        console.print(line)
