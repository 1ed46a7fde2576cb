"""The variables of a function that runs, read so that it does not keep them longer than it would."""

from __future__ import annotations

import dis
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
    """Return whether a function may hold its own variables as a dictionary, which changes when they are asked for.

    >>> def evaluates(model): model.eval(); return sys._getframe()
    >>> def keeps(): kept = locals(); return sys._getframe()
    >>> import sys; from types import SimpleNamespace
    >>> may_keep_variables(evaluates(SimpleNamespace(eval=int))), may_keep_variables(keeps())
    (False, True)
    """
    if _KEEPS_VARIABLES.isdisjoint(frame.f_code.co_names):
        return False
    # `model.eval()` has that name, too: of a method, which keeps nothing
    instructions = dis.get_instructions(frame.f_code)
    return any(one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval in _KEEPS_VARIABLES for one in instructions)
