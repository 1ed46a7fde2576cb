"""Terminals that are gone when their test is. The scripts of many styles are run, not collected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.programs import OnTerminal, Terminal

collect_ignore = ["styles"]


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[OnTerminal]:
    """Return what starts the penstock command on a terminal; whatever becomes of the test, it is ended afterwards."""
    with contextlib.ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(Terminal(tmp_path, *words, **options))
