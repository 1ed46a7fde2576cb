"""Says what to type where penstock runs without the script's packages, or with another torch than the script's.

`uvx` and `pipx run` give penstock an environment of its own, with the newest torch. `uv run --with penstock` puts that
environment before the script's, whose torch is then hidden.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TOOLS = {"uv": "uvx", "archive-v0": "uvx", "builds-v0": "uvx", "pipx": "pipx run"}
"""Folders below which uv and pipx keep the environments of single tools; two of them in a cache of any name."""
_IN_THE_SCRIPTS = "in the script's environment, `pip install penstock` and `python -m penstock run`"


def isolation_hint(error: BaseException) -> str | None:
    """Return what to do about an error that comes from the environment that penstock runs in; else None.

    >>> isolation_hint(ValueError()) is None
    True
    """
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return _about_missing(error.name.partition(".")[0])
    tool = _tool()
    if tool is None or not _may_be_another_torch(error):
        return None
    from importlib.metadata import PackageNotFoundError, version  # 30 ms, which most runs need not spend

    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        return None
    return (
        f"penstock runs in an environment of its own ({sys.prefix}), with {torch}. If the script needs another: "
        f"`{tool} --with torch==VERSION penstock run`; or, {_IN_THE_SCRIPTS}"
    )


def hidden_torch() -> str | None:
    """Return what to do if penstock's environment hides the script's torch by another; else None."""
    if _tool() is None:
        return None
    from importlib.metadata import distributions

    found = list(dict.fromkeys(found.version for found in distributions(name="torch")))
    if len(found) < 2:
        return None
    return (
        f"the script gets torch {found[0]}, from penstock's environment, and not its own torch {found[1]}. "
        f"To keep that: `--with torch=={found[1].partition('+')[0]}`; or, {_IN_THE_SCRIPTS}"
    )


def _about_missing(package: str) -> str | None:
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


def _may_be_another_torch(error: BaseException) -> bool:
    """Tell errors of packages that were built for another torch, and of names that this one has not."""
    if isinstance(error, AttributeError):
        return str(getattr(error.obj, "__name__", "")).partition(".")[0] == "torch"
    if isinstance(error, ImportError) and (error.name or "").startswith("torch"):
        return True
    text = str(error)
    return any(words in text for words in ("undefined symbol", "shared object file")) or (
        "operator torch" in text and "does not exist" in text
    )


def _tool() -> str | None:
    return next((tool for folder, tool in _TOOLS.items() if folder in Path(sys.prefix).parts), None)
