"""`penstock tune`."""

from __future__ import annotations

import argparse
import json
import sys

from penstock.cli.named import named
from penstock.core.errors import OptionError


class Tune:
    """Find the settings with which a loop waits least for its data, by short trials of it.

    The object is a DataLoader (torch's or penstock's), a function that returns one, or (loader, step). The step is
    a function that takes a batch; without one, --step-ms says how long a step takes on a device. Of settings that are
    equally fast, the one with the fewest workers and the least memory is chosen. Results are kept for this dataset,
    step and machine in the user's cache folder.
    """

    name = "tune"

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        parser.add_argument("object", metavar="module:loader", help="as in train:loader; looked for here first")
        step = parser.add_mutually_exclusive_group()
        step.add_argument("--step", metavar="module:step", help="what the loop does with a batch")
        step.add_argument("--step-ms", type=float, metavar="X", help="how long a step takes on a device")
        parser.add_argument("--ram", metavar="SIZE", help="the most that workers and batches may take, as in 4GiB")
        parser.add_argument(
            "--cpus",
            type=int,
            metavar="N",
            help="the most processors that workers keep busy (default: the usable cores)",
        )
        parser.add_argument("--no-cache", action="store_true", help="neither use an earlier result nor keep this one")
        parser.add_argument("--json", action="store_true", help="print it as JSON")

    def run(self, args: argparse.Namespace) -> int:
        """Search and print."""
        from penstock.core.units import parse_size
        from penstock.tune.cache import Cache, key_of
        from penstock.tune.search import tune
        from penstock.tune.subject import subject_of

        try:
            ram_nbytes = parse_size(args.ram) if args.ram is not None else None
        except ValueError as error:
            raise OptionError(f"--ram: {error}") from error
        if args.step_ms is not None and args.step_ms < 0:
            raise OptionError(f"--step-ms {args.step_ms:g} is no time; give milliseconds, 0 or more")
        step = named(args.step) if args.step is not None else None
        subject = subject_of(named(args.object), step=step, step_s=(args.step_ms or 0.0) / 1e3)
        cache, found = Cache(), None
        key = key_of(subject, object=args.object, ram_nbytes=ram_nbytes, cpus=args.cpus)
        if not args.no_cache:
            found, word = cache.load(key)
            _say(word or ("from an earlier search (--no-cache to search again)" if found is not None else ""))
        if found is None:
            found = tune(subject, ram_nbytes=ram_nbytes, cpus=args.cpus, say=_say)
            if not args.no_cache:
                _say(cache.save(key, found))
        print(json.dumps(found.to_json(), indent=2) if args.json else found.render().rstrip())
        return 0


def _say(words: str) -> None:
    if words:
        print(f"penstock: {words}", file=sys.stderr)
