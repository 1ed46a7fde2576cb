"""What a verb of the command is."""

from __future__ import annotations

import argparse
from typing import Protocol


class Verb(Protocol):
    """One thing the command can do."""

    name: str

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code."""
        ...
