"""Which lines of the user's program a sample spends its time in, and what each of them calls.

A timer's signal interrupts the main thread every few milliseconds, between two instructions of Python's, and its
handler looks at the stack. Unlike a profiler it sees lines, and it does not make cheap calls look expensive; what a
line waits for counts like what it computes. (A second thread that looks gets Python's lock where the first one gives it
up, in a line that reads or calls torch, and sees short samples there only.)
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Container
from types import FrameType
from typing import Any

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes import step_calls, time_limit
from penstock.observe.doctor.probes.source_lines import is_same_for_all, line_text
from penstock.observe.doctor.probes.step_calls import NOT_THE_USERS
from penstock.observe.doctor.thresholds import THRESHOLDS

_INTERVAL_S = 0.003
_CHAIN_S = 0.25
"""How often the handler that was there before is called, such as a time limit's."""

_INSIDE = (step_calls.__file__, time_limit.__file__)
"""Files of penstock's that Python calls in the middle of the user's code: for an operation, a signal, a garbage
collection."""
_LEAST_LOOKS = 10
_SHOWN = 3

_Place = tuple[str, int, str]


class LineSampler:
    """Looks at the thread that made it, from `start` to `stop` or in a `with` block, if the main thread starts it."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._looks = 0
        self._seconds: dict[_Place | None, float] = {}
        self._turns: dict[_Place | None, set[int]] = {}
        self._is_on = False
        self._looked_at = self._chained_at = 0.0
        self._before: Any = None
        self._timer = (0.0, 0.0)
        self.turn = 0
        """The number of what the thread does now, a sample or a step: a line may be seen in many of them, or in one."""
        self.is_paused = False
        """Whether the thread does something else now, whose time counts for nothing."""

    def start(self) -> None:
        """Begin to look; may be called again."""
        if not self._is_on and threading.current_thread() is threading.main_thread():
            self._is_on = True
            self._looked_at = self._chained_at = time.perf_counter()
            self._before = signal.signal(signal.SIGALRM, self.look)
            self._timer = signal.setitimer(signal.ITIMER_REAL, _INTERVAL_S, _INTERVAL_S)

    def stop(self) -> None:
        """Look no more; may be called again, and before `start`."""
        if not self._is_on:
            return
        self._is_on = False
        if signal.getsignal(signal.SIGALRM) == self.look:  # else a time limit that ended has taken its own away
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
            signal.signal(signal.SIGALRM, self._before)

    def __enter__(self) -> LineSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def lines(self, *, of_own: bool = False) -> tuple[HotLine, ...]:
        """Return the lines that were seen most often; empty if it has hardly looked.

        Args:
            of_own: as fractions of the time in the program itself, without penstock's (which waits for batches).
        """
        total_s = sum(seconds for place, seconds in self._seconds.items() if place is not None or not of_own)
        if self._looks < _LEAST_LOOKS or not total_s:
            return ()
        turns = len(set[int]().union(*self._turns.values()))
        largest = sorted(self._seconds, key=lambda place: -self._seconds[place])
        seen = [(place, self._seconds[place] / total_s) for place in largest if place is not None]
        return tuple(
            HotLine(
                line=line_text(place[0], place[1]),
                calls=place[2],
                fraction=fraction,
                turns_fraction=len(self._turns[place]) / turns,
                is_same_for_all=is_same_for_all(place[0], place[1]),
            )
            for place, fraction in seen[:_SHOWN]
            if fraction >= THRESHOLDS.hotspot_fraction
        )

    def fraction_of(self, file: str, numbers: Container[int]) -> float:
        """Return the fraction of the time that was spent in these lines."""
        seen_s = sum(
            seconds for place, seconds in self._seconds.items() if place and place[0] == file and place[1] in numbers
        )
        return seen_s / sum(self._seconds.values()) if self._looks >= _LEAST_LOOKS else 0.0

    def look(self, number: int, frame: FrameType | None) -> None:
        """Note where the thread is; the signal's handler."""
        before, self._looked_at = self._looked_at, time.perf_counter()
        if not self.is_paused:
            if threading.get_ident() != self._thread_id:
                frame = sys._current_frames().get(self._thread_id)
            place = _place(frame)
            # All of the time since the last look: a call into C is only interrupted when it returns.
            self._seconds[place] = self._seconds.get(place, 0.0) + self._looked_at - before
            self._turns.setdefault(place, set()).add(self.turn)
            self._looks += 1
        if callable(self._before) and self._looked_at - self._chained_at > _CHAIN_S:
            self._chained_at = self._looked_at
            self._before(number, frame)


def _place(frame: FrameType | None) -> _Place | None:
    """Return the innermost line of the user's own, and the library function that it calls."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _INSIDE:
            frame = frame.f_back
            continue
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
