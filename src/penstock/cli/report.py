"""`penstock report`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.core.errors import OptionError
from penstock.observe.compare import Comparison
from penstock.observe.record import RunRecord


class Report:
    """Print a saved run again, compare two, or write them for other tools.

    With two files, the first is compared with the second. With --html, --trace or --tensorboard, the files are
    written and nothing is printed.
    """

    name = "report"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("file", type=Path, help="a run.json")
        parser.add_argument("other", type=Path, nargs="?", help="another one, to compare the first with")
        parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at, without a network")
        parser.add_argument(
            "--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto or chrome://tracing"
        )
        parser.add_argument(
            "--merge",
            type=Path,
            action="append",
            default=[],
            metavar="TRACE",
            help="put this trace into --trace's file too: torch.profiler's, or that of `penstock run --trace`",
        )
        parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write the timeline as TensorBoard scalars")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Print or write the run."""
        from penstock.observe import compare, record, report

        if args.merge and args.trace is None:
            raise OptionError("--merge puts a trace into the file that --trace names; give --trace FILE as well")
        saved = record.load(args.file)
        against, names = None, [str(args.file), str(args.other)]
        if args.other is not None:
            names = names if args.file.name == args.other.name else [args.file.name, args.other.name]
            against = compare.with_run(saved, record.load(args.other), names[1])
        written = _write(saved, against, args)
        if args.json:
            data = record.as_json(saved) if against is None else compare.as_json(saved, against, names[0])
            print(json.dumps(data, indent=2, default=repr))
        elif not written:
            text = report.render(saved) if against is None else compare.render(saved, against, names[0])
            print(text.rstrip())
        return 0


def _write(saved: RunRecord, against: Comparison | None, args: argparse.Namespace) -> bool:
    """Write what was asked for; return whether anything was."""
    if args.html is not None:
        from penstock.observe.page import write_html

        write_html(saved, args.html, against)
    if args.trace is not None:
        from penstock.observe import trace

        trace.write(trace.of_timeline(saved), args.trace, merge=args.merge)
    if args.tensorboard is not None:
        from penstock.observe.tensorboard import write_scalars

        write_scalars(saved, args.tensorboard)
    return any(option is not None for option in (args.html, args.trace, args.tensorboard))
