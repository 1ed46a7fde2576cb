"""Other Python processes: how they start without the current folder among the folders that modules come from.

`python -c` and `python -m` search the current folder first. Where that holds a stranger's data, a `json.py` beside them
would run. A script has its own folder there instead, so a new process begins with `start.py`, which sets the path
before it imports anything. `python -P` would do the same, and be seen: `sys.flags` goes to the processes of processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock.core.package_folder import PACKAGE_FOLDER

_START = os.path.join(os.path.dirname(__file__), "start.py")


def arguments_of(code: str, *arguments: str, path: Sequence[str] | None = None) -> list[str]:
    """Return an interpreter's arguments with which it runs `code`, as `-c code` and the arguments would.

    Args:
        code: Python.
        arguments: what `sys.argv` has after the first.
        path: its `sys.path`; that of this process by default.

    >>> import subprocess
    >>> command = [sys.executable, *arguments_of("import sys; print(sys.argv[1:], end='')", "a")]
    >>> subprocess.run(command, capture_output=True, text=True).stdout
    "['a']"
    """
    folders = [str(one) for one in (sys.path if path is None else path)]
    root = os.path.dirname(PACKAGE_FOLDER)
    if root not in folders:  # penstock was found in the current folder
        folders.append(root)
    return [_START, code, str(len(folders)), *folders, *arguments]


def path_of_command() -> list[str]:
    """Return this process's `sys.path` with a folder without modules as the first, which a program's own replaces."""
    return sys.path if sys.flags.safe_path else [os.path.dirname(_START), *sys.path[1:]]
