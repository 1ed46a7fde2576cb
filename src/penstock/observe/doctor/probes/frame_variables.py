"""The variables of a function that runs, read so that it does not keep them longer than it would."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

_KEEPS_VARIABLES = frozenset({"locals", "vars", "dir", "eval", "exec"})
"""What a function calls that may hold its own variables as a dictionary: before Python 3.13 there is one for all."""


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the variables of a function, or of a module.

    Before Python 3.13 a function that was asked for them keeps a copy of its own, and what it has deleted lives on.
    """
    own = frame.f_locals
    found = dict(own)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and not may_keep_variables(frame):
        own.clear()
    return found


def may_keep_variables(frame: FrameType) -> bool:
    """Return whether a function may hold its own variables as a dictionary, which changes when they are asked for."""
    return not _KEEPS_VARIABLES.isdisjoint(frame.f_code.co_names)
