"""Whose code a file is: the program's own, or that of penstock, of Python, or of an installed package."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import re
from collections.abc import Iterator
from types import FrameType

from penstock.core.package_folder import PACKAGE_FOLDER

_INSTALLED = re.compile(r"/(lib/python3\.\d+t?|site-packages|dist-packages)/")


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a file, as the interpreter knows it, was written for the program that runs.

    >>> is_users("/home/me/train.py"), is_users(os.__file__), is_users("<string>"), is_users(__file__)
    (True, False, False, False)
    """
    if file.startswith("<ipython-input-"):  # a cell
        return True
    return not (file.startswith(("<", PACKAGE_FOLDER, *_torch_folders())) or _INSTALLED.search(file))


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the functions of the program's own that run, innermost first."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def line_text(file: str, number: int) -> str:
    """Return a line with its file's name and its number, as in "train.py:12: x = load(path)"."""
    text = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}:{number}: {text}" if text else f"{os.path.basename(file)}:{number}"


@functools.cache
def _torch_folders() -> tuple[str, ...]:
    """Return where torch lies, which may be built in a folder of its own."""
    found = importlib.util.find_spec("torch")
    return tuple(found.submodule_search_locations or ()) if found is not None else ()
