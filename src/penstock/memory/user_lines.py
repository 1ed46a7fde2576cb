"""Lines of the user's program: whether a file is the user's, and the text of a line for a message."""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path

import torch

from penstock.core.package_folder import PACKAGE_FOLDER

_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")  # which may lie inside of Python's own folder


def is_users(file: str) -> bool:
    """Return whether a line of `file` is neither torch's, nor ours, nor Python's own library's."""
    return not file.startswith((_TORCH, PACKAGE_FOLDER)) and (not file.startswith(_PYTHON) or is_packaged(file))


def is_packaged(file: str) -> bool:
    """Return whether `file` is that of an installed package."""
    return any(package in file for package in _PACKAGES)


def line_text(file: str, number: int) -> str:
    """Return a line's place and source: "train.py:31: loss = criterion(model(x), y)"."""
    source = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}{f': {source}' if source else ''}"
