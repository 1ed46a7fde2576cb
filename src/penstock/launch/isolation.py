"""Says what to type where penstock runs without the script's packages, as `uvx` and `pipx run` start it."""

from __future__ import annotations

import sys
from pathlib import Path

_TOOLS = {"uv": "uvx", "archive-v0": "uvx", "builds-v0": "uvx", "pipx": "pipx run"}
"""Folders below which uv and pipx keep the environments of single tools; two of them in a cache of any name."""
_IN_THE_SCRIPTS = "in the script's environment, `pip install penstock` and `python -m penstock run`"


def isolation_hint(error: BaseException) -> str | None:
    """Return what to do about a package that the environment of penstock lacks; else None.

    >>> isolation_hint(ValueError()) is None
    True
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    tool = _tool()
    if tool is not None:
        return (
            f"{package} is not installed beside penstock, which runs in an environment of its own ({sys.prefix}). "
            f"Bring it along: `{tool} --with {package} penstock run`, by its name on PyPI; or, {_IN_THE_SCRIPTS}; or, "
            "in a project of uv's, `uv run --with penstock penstock run`"
        )
    if package == "torch":
        return f"torch is not installed in {sys.prefix}: `pip install torch` there; or, {_IN_THE_SCRIPTS}"
    return None


def _tool() -> str | None:
    return next((tool for folder, tool in _TOOLS.items() if folder in Path(sys.prefix).parts), None)
