"""Optional packages: imported when a format needs them, and named by their extra when they are not there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.core.errors import ExtraError


def need(module: str, extra: str) -> Any:
    """Return the optional `module`, imported.

    Raises:
        ExtraError: it is not installed.

    >>> need("json", "text").loads("[1]")
    [1]
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ExtraError(
            f'{module.partition(".")[0]} is needed and not installed: pip install "penstock[{extra}]" ({error})'
        ) from error
