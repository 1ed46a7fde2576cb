"""`penstock report`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.core.errors import OptionError
from penstock.core.urls import shown
from penstock.observe.record.run_record import RunRecord


class Report:
    """Print the report of a saved run (the newest, if none is given), compare two runs, or export them to other tools.

    With two files, penstock compares the first run with the second, as text or with --json. With --html, --trace or
    --tensorboard, it writes files and prints nothing.
    """

    name = "report"
    examples = (
        ("penstock report", "the newest run"),
        ("penstock report before/run.json after/run.json", "compare two runs"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument(
            "file",
            type=Path,
            nargs="?",
            metavar="RUN",
            help="a run.json that `penstock run` wrote, or its folder; the newest in penstock-runs by default",
        )
        parser.add_argument(
            "other", type=Path, nargs="?", metavar="OTHER", help="another run, to compare the first one with"
        )
        parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser; it needs no network")
        parser.add_argument(
            "--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto or chrome://tracing"
        )
        parser.add_argument(
            "--merge",
            type=Path,
            action="append",
            default=[],
            metavar="TRACE",
            help="merge this trace into the file of --trace: one of torch.profiler or of `penstock run --trace`",
        )
        parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write the timeline as TensorBoard scalars")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Print or write the run."""
        from penstock.launch.run_folder import run_file
        from penstock.observe.record import comparison_text, run_record
        from penstock.observe.record.compare_runs import compare_runs
        from penstock.observe.report import text_report

        if args.other is not None and args.html is not None:
            raise OptionError("penstock compares two runs as text, or with --json; leave out --html, or the second run")
        if args.merge and args.trace is None:
            raise OptionError("--merge needs a file to merge into; give --trace FILE as well")
        saved = run_record.load(run_file(args.file))
        comparison, names = None, [str(args.file), str(args.other)]
        if args.other is not None:
            names = names if args.file.name == args.other.name else [args.file.name, args.other.name]
            comparison = compare_runs(saved, run_record.load(run_file(args.other)), names[1])
        written = _write(saved, args)
        if args.json:
            data = (
                run_record.as_json(saved)
                if comparison is None
                else comparison_text.as_json(saved, comparison, names[0])
            )
            print(json.dumps(data, indent=2, default=repr))
        elif not written:
            text = (
                text_report.render(saved) if comparison is None else comparison_text.render(saved, comparison, names[0])
            )
            print(shown(text.rstrip()))
        return 0


def _write(saved: RunRecord, args: argparse.Namespace) -> bool:
    """Write the requested files; return whether there were any."""
    if args.html is not None:
        from penstock.observe.report.write_html import write_html

        write_html(saved, args.html)
    if args.trace is not None:
        from penstock.observe.record import perfetto_trace

        perfetto_trace.write_trace(perfetto_trace.trace_of_timeline(saved), args.trace, merge=args.merge)
    if args.tensorboard is not None:
        from penstock.observe.record.tensorboard import write_scalars

        write_scalars(saved, args.tensorboard)
    return any(option is not None for option in (args.html, args.trace, args.tensorboard))
