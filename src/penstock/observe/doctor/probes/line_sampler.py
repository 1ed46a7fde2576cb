"""Which lines of the user's program a sample spends its time in, and what each of them calls.

A second thread looks at the stack of the first every few milliseconds. Unlike a profiler it sees lines, and it does not
make cheap calls look expensive; what a line waits for counts like what it computes.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections import Counter
from collections.abc import Container
from types import FrameType

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes.step_calls import NOT_THE_USERS
from penstock.observe.doctor.thresholds import THRESHOLDS

_INTERVAL_S = 0.003
_SWITCH_INTERVAL_S = 1e-4
"""How long a look waits for Python's lock. In Python's own 5 ms a line that computes would have ended before the look,
and the next line that reads a file, which gives up the lock, is seen in its place."""
_LEAST_LOOKS = 10
_SHOWN = 3

_Place = tuple[str, int, str]


class LineSampler:
    """Looks at the thread that made it, inside a `with` block."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._looks: Counter[_Place | None] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="penstock-lines")

    def __enter__(self) -> LineSampler:
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_interval_s)

    def lines(self) -> tuple[HotLine, ...]:
        """Return the lines that were seen most often; empty if it has hardly looked."""
        total = self._looks.total()
        if total < _LEAST_LOOKS:
            return ()
        seen = [(place, count / total) for place, count in self._looks.most_common(_SHOWN + 1) if place is not None]
        return tuple(
            HotLine(line=line_text(file, number), calls=calls, fraction=fraction)
            for (file, number, calls), fraction in seen[:_SHOWN]
            if fraction >= THRESHOLDS.hotspot_fraction
        )

    def fraction_of(self, file: str, numbers: Container[int]) -> float:
        """Return the fraction of the looks that found one of these lines."""
        seen = sum(count for place, count in self._looks.items() if place and place[0] == file and place[1] in numbers)
        total = self._looks.total()
        return seen / total if total >= _LEAST_LOOKS else 0.0

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._looks[_place(sys._current_frames().get(self._thread_id))] += 1


def _place(frame: FrameType | None) -> _Place | None:
    """Return the innermost line of the user's own, and the library function that it calls."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE_FOLDER):
            return None
        is_generated = code.co_filename.startswith("<")
        if not is_generated and not code.co_filename.startswith(NOT_THE_USERS):
            return code.co_filename, frame.f_lineno, called
        if not is_generated:
            called = f"{frame.f_globals.get('__name__', '')}.{code.co_qualname}"
        frame = frame.f_back
    return None


def find_line(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the file and number of the innermost line of the user's own; None without one."""
    place = _place(frame)
    return None if place is None else place[:2]


def line_text(file: str, number: int) -> str:
    """Return a line with its file's name and its number."""
    text = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}:{number}: {text}" if text else f"{os.path.basename(file)}:{number}"
