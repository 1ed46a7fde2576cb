"""The functions in which a line of a step runs, and whether one of them may change what batches are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import CodeType, FrameType

from penstock.observe.doctor.probes.frame_variables import variables_of
from penstock.observe.doctor.probes.steps.assigned_names import names_of
from penstock.observe.doctor.probes.steps.call_statements import Reached

_Line = tuple[str, int]


class FunctionsAround:
    """Notes the functions around each line, and the objects that they are methods of."""

    def __init__(self) -> None:
        self._looks = 0
        self._seen: Counter[CodeType] = Counter()
        self._around: dict[_Line, dict[CodeType, int]] = {}
        """By line, its functions, innermost first, and which object each was first called for."""

    def note(self, line: _Line, frames: Sequence[FrameType]) -> None:
        """Note the functions of the program's that run, innermost first, when a line is looked at."""
        self._looks += 1
        self._seen.update({frame.f_code for frame in frames})
        known = self._around.setdefault(line, {})
        for frame in frames:
            if frame.f_code not in known:
                known[frame.f_code] = _object_of(frame)

    def feeds(self, line: _Line, loading: Reached) -> bool:
        """Return whether a function around a line assigns what batches are made of, or belongs to an object that is.

        The functions around all lines, which run the loop, are left out, but for the line's own.
        """
        around = self._around.get(line, {})
        return any(
            around[code] in loading.ids or names_of(code).assigned & loading.read
            for place, code in enumerate(around)
            if not place or self._seen[code] < self._looks
        )


def _object_of(frame: FrameType) -> int:
    """Return the identity of what a method was called for, or of a function's first argument; 0 without one."""
    code = frame.f_code
    return id(variables_of(frame).get(code.co_varnames[0])) if code.co_argcount else 0
