"""`penstock convert`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli.bar import shown
from penstock.core.errors import OptionError, PenstockError

if TYPE_CHECKING:
    from penstock.feed.convert import Conversion


class Convert:
    """Write a data set in another format, in parallel; after a kill the same command goes on.

    SRC is what `penstock.open` takes: a folder, a file, a URL, braces, wildcards. DST is of this machine, and its name
    tells its format; braces, as in out-{000..015}.tar, --shards and --shard-size make many files. Samples come back
    from DST equal, bit by bit; a format that cannot hold them refuses. A folder of pictures is written decoded; with
    --fields encoded,label the files' bytes are taken as they are.

    The work is done and journaled in DST.partial, which is removed at the end; it needs room for the result twice. DST
    gets its name when it is whole, and nothing that is there is replaced without --overwrite.

    --verify reads the result again and compares all samples. Where DST is there already, and --overwrite is not given,
    the two are compared and nothing is written.

    The exit code is 0; 2 when something is wrong; 130 after Ctrl-C.
    """

    name = "convert"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("src", nargs="+", metavar="SRC", help="what to read")
        parser.add_argument("dst", metavar="DST", help="what to write")
        parser.add_argument("--from", dest="format", metavar="FORMAT", help="of SRC, where its name does not tell it")
        parser.add_argument("--to", metavar="FORMAT", help="of DST, where its name does not tell it")
        parser.add_argument("--fields", metavar="A,B", help="the fields to take; new=old renames one")
        parser.add_argument(
            "--workers", type=int, metavar="N", help="processes (default: the usable cores; 0 for none but this one)"
        )
        many = parser.add_mutually_exclusive_group()
        many.add_argument("--shards", type=int, metavar="N", help="make N files, as in out-000000.tar")
        many.add_argument("--shard-size", metavar="SIZE", help="make files of about this size, as in 256MiB")
        parser.add_argument("--overwrite", action="store_true", help="replace DST, at the end")
        parser.add_argument(
            "--errors", choices=("raise", "skip"), default="raise", help="at broken records (default: %(default)s)"
        )
        parser.add_argument("--verify", action="store_true", help="compare SRC and DST, sample by sample")
        parser.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of SRC's format"
        )
        parser.add_argument(
            "--to-option", action="append", default=[], metavar="NAME=VALUE", help="an option of DST's format"
        )
        parser.add_argument("--quiet", action="store_true", help="show no progress, and no result")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Convert, and print what was done."""
        from penstock.feed.convert import convert

        try:
            with shown(quiet=args.quiet) as progress:
                done = convert(
                    args.src[0] if len(args.src) == 1 else args.src,
                    args.dst,
                    format=args.format,
                    to=args.to,
                    fields=fields_of(args.fields),
                    workers=args.workers,
                    shards=args.shards,
                    shard_size=args.shard_size,
                    overwrite=args.overwrite,
                    errors=args.errors,
                    options=options_of(args.option),
                    writer_options=options_of(args.to_option),
                    verify=args.verify,
                    progress=progress,
                )
        except PenstockError as error:
            print(f"penstock: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("penstock: interrupted; the same command goes on where this one stopped", file=sys.stderr)
            return 128 + signal.SIGINT
        if args.json:
            print(json.dumps({"schema": "penstock.convert/1", **asdict(done)}, indent=2))
        elif not args.quiet:
            print(_told(done))
        return 0


def fields_of(text: str | None) -> dict[str, str] | None:
    """Return {name in the sample: name in the file} of "a,new=old"; None for None.

    Raises:
        OptionError: it is nothing of the kind.

    >>> fields_of("image,label=y")
    {'image': 'image', 'label': 'y'}
    """
    if text is None:
        return None
    fields: dict[str, str] = {}
    for one in text.split(","):
        new, has_old, old = one.strip().partition("=")
        if not new or (has_old and not old) or new in fields:
            raise OptionError(f"--fields {text} names no fields; write it as in image,label or image=x,label=y")
        fields[new] = old or new
    return fields


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options that "name=value" words name; values are JSON, and text where they are none.

    Raises:
        OptionError: a word has no value.

    >>> options_of(["check=false", "size=[224, 224]", "delimiter=;"])
    {'check': False, 'size': [224, 224], 'delimiter': ';'}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, has_value, value = pair.partition("=")
        if not name or not has_value:
            raise OptionError(f"{pair!r} is no option; write it as in name=value")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _told(done: Conversion) -> str:
    from penstock.core.units import size_text

    files = done.files[0] if len(done.files) == 1 else f"{done.files[0]} ... {done.files[-1]} ({len(done.files)} files)"
    lines = [f"{files}: {done.samples} samples, {size_text(done.nbytes)}, in {done.seconds:.1f} s"]
    if done.resumed:
        lines.append(f"  {done.resumed} of them were written by an earlier attempt")
    if done.skipped:
        lines.append(f"  {done.skipped} broken records were left out")
    if done.verified:
        lines.append("  verified: read again, and every sample is equal")
    return "\n".join([*lines, f"  {done.checksum}"])
