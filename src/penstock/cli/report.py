"""`penstock report`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


class Report:
    """Print a saved run again."""

    name = "report"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("file", type=Path, help="a run.json")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Print the run."""
        from penstock.observe import record, report

        saved = record.load(args.file)
        print(json.dumps(record.as_json(saved), indent=2, default=repr) if args.json else report.render(saved).rstrip())
        return 0
