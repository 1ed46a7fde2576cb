"""The protocol of the command's verbs."""

from __future__ import annotations

import argparse
from typing import Protocol


class Verb(Protocol):
    """One verb of the command, such as `penstock run`.

    The class's docstring is the help text, and its first line the summary.

    `main` calls `add_arguments` of every verb, then `run` of the one that was given.
    """

    name: str
    """As it is written on the command line."""

    examples: tuple[tuple[str, str], ...]
    """Command lines that the help ends with, and what each of them is for."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the verb and return the exit code.

        Raises:
            PenstockError: `main` prints it in one line and exits with 2.
        """
        ...
