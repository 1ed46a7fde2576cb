"""Runs a few lines of Python in a separate process that can import the helper modules of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def run(
    code: str, *command: str, environment: dict[str, str] | None = None, **arguments: Any
) -> subprocess.CompletedProcess[str]:
    """Run `code` with this Python, behind the words of `command` if there are any."""
    known = os.environ if environment is None else environment
    environment = {**known, "PYTHONPATH": os.pathsep.join([str(TESTS), known.get("PYTHONPATH", "")])}
    return subprocess.run(
        [*command, sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        **arguments,
    )


def written(folder: Path, name: str = "run.json") -> Path:
    """Return a file of the only run that was started in `folder`."""
    (file,) = folder.glob(f"penstock-runs/*/{name}")
    return file
