"""`penstock convert`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli.option_values import parse_fields, parse_options
from penstock.cli.progress_line import ProgressLine
from penstock.core.errors import PenstockError
from penstock.core.urls import redact_all, shown

if TYPE_CHECKING:
    from penstock.data.convert import Conversion, Progress


class Convert:
    """Convert a data set to another format, in parallel; the same command resumes an interrupted conversion.

    SRC is anything that `penstock.open` takes: a folder, a file, a URL, braces, wildcards. DST is a local path, or a
    URL of s3://, gs:// or az://; its name determines its format. Braces, as in out-{000..015}.tar, --shards and
    --shard-size create several files.

    Reading DST returns the same samples, bit by bit. If a format can't hold them, you get an error. Penstock writes the
    images of a folder decoded; with --fields encoded,label it copies the files' bytes instead.

    The conversion works in DST.partial, and keeps the files that are complete there. The same command then resumes with
    the others. So write a large result as several files, with --shards. DST appears when all of it is complete, and
    DST.partial is removed. For a URL that folder is in $XDG_CACHE_HOME/penstock/convert (~/.cache), and penstock
    uploads the complete files. It replaces existing files only with --overwrite.

    --verify reads the result again, and compares the checksums and the order of all samples with those of SRC.

    The exit code is 0; 2 after an error; 130 after Ctrl-C.
    """

    name = "convert"
    examples = (
        ("penstock convert images/ train.h5 --verify", "one file, then compare all samples"),
        ('penstock convert images/ "train-{000..015}.tar" --fields encoded,label', "16 shards with the files' bytes"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("src", nargs="+", metavar="SRC", help="what to read")
        parser.add_argument("dst", metavar="DST", help="what to write")
        parser.add_argument("--format", metavar="FORMAT", help="format of SRC, if its name does not determine it")
        parser.add_argument("--to", metavar="FORMAT", help="format of DST, if its name does not determine it")
        parser.add_argument("--fields", metavar="A,B", help="the fields to write; new=old renames one")
        parser.add_argument(
            "--workers",
            type=int,
            metavar="N",
            help="worker processes; 0 converts in this process (default: the usable cores)",
        )
        many = parser.add_mutually_exclusive_group()
        many.add_argument("--shards", type=int, metavar="N", help="create N files, as in out-000000.tar")
        many.add_argument("--shard-size", metavar="SIZE", help="create files of about so many bytes each, as in 256MiB")
        parser.add_argument("--overwrite", action="store_true", help="replace DST when the result is complete")
        parser.add_argument(
            "--errors",
            choices=("raise", "skip"),
            default="raise",
            help="what to do with broken records (default: %(default)s)",
        )
        parser.add_argument("--verify", action="store_true", help="read the result again, and compare all samples")
        parser.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of SRC's format; repeatable"
        )
        parser.add_argument(
            "--writer-option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="an option of DST's format; repeatable",
        )
        parser.add_argument("--quiet", action="store_true", help="show neither the progress nor the result")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Convert, and print the result."""
        from penstock.data.convert import convert

        try:
            with ProgressLine() as line:
                done = convert(
                    args.src[0] if len(args.src) == 1 else args.src,
                    args.dst,
                    format=args.format,
                    to=args.to,
                    fields=parse_fields(args.fields),
                    workers=args.workers,
                    shards=args.shards,
                    shard_size=args.shard_size,
                    overwrite=args.overwrite,
                    errors=args.errors,
                    options=parse_options(args.option),
                    writer_options=parse_options(args.writer_option),
                    verify=args.verify,
                    progress=None if args.quiet else lambda now: line.show(_progress_text(now)),
                )
        except PenstockError as error:
            print(
                f"penstock: {shown(str(error))}",
                *map(shown, getattr(error, "__notes__", ())),
                sep="\n",
                file=sys.stderr,
            )
            return 2
        except KeyboardInterrupt:
            print("penstock: interrupted; run the same command again to resume", file=sys.stderr)
            return 128 + signal.SIGINT
        if args.json:
            print(json.dumps(redact_all({"schema": "penstock.convert/1", **asdict(done)}), indent=2))
        elif not args.quiet:
            print(shown(_result_text(done)))
        return 0


def _progress_text(now: Progress) -> str:
    from penstock.core.units import size_text

    total = "" if now.total is None else f" of {now.total}"
    return f"{now.stage}, {now.samples}{total} samples, {size_text(now.nbytes)}"


def _result_text(done: Conversion) -> str:
    from penstock.core.units import size_text

    files = done.files[0] if len(done.files) == 1 else f"{done.files[0]} ... {done.files[-1]} ({len(done.files)} files)"
    lines = [f"{files}: {done.samples} samples, {size_text(done.nbytes)}, in {done.seconds:.1f} s"]
    if done.resumed:
        lines.append(f"  {done.resumed} of them were written by an earlier run")
    if done.skipped:
        lines.append(f"  {done.skipped} broken records were skipped")
    if done.verified:
        lines.append("  verified: every sample read back is equal")
    return "\n".join([*lines, f"  {done.checksum}"])
