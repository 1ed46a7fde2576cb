"""Explains a package that is missing where penstock runs in an environment of its own, as `uvx` makes one."""

from __future__ import annotations

import sys
from pathlib import Path

_TOOLS = {"uv", "pipx", "archive-v0"}
"""Folders below which uv and pipx keep the environments of single tools; the last one in a cache of any name."""


def isolation_hint(error: BaseException) -> str | None:
    """Return what to do about a package that is missing in an environment of penstock's own; else None.

    >>> isolation_hint(ValueError()) is None
    True
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None or _TOOLS.isdisjoint(Path(sys.prefix).parts):
        return None
    return (
        f"{error.name.partition('.')[0]} is not installed beside penstock, which runs in an environment of its own "
        f"({sys.prefix}). Run it in the script's: `pip install penstock` and `python -m penstock run` there, or "
        "`uv run --with penstock penstock run`"
    )
