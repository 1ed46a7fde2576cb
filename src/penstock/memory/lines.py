"""Lines of the user's program: which ones are, and what they say."""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_PYTHON = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")  # which may lie inside of Python's own folder


def is_users(file: str) -> bool:
    """Return whether a line of `file` is neither torch's, nor ours, nor Python's own library's."""
    return not file.startswith((_TORCH, _OURS)) and (not file.startswith(_PYTHON) or any(p in file for p in _PACKAGES))


def line_text(file: str, number: int) -> str:
    """Return where a line is and what it says: "train.py:31: loss = criterion(model(x), y)"."""
    source = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}{f': {source}' if source else ''}"
