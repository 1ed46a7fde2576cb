"""Which lines of the user's program a sample, a step or a collate function spends its time in, and what they call.

A timer's signal interrupts the main thread every few milliseconds, between two instructions of Python's, and its
handler looks at the stack. Unlike a profiler it sees lines, and it does not make cheap calls look expensive; what a
line waits for counts like what it computes. (A second thread that looks gets Python's lock where the first one gives it
up, in a line that reads or calls torch, and sees short samples there only.)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.core.user_code import is_users, line_text
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes.timer_signal import TimerSignal

_HOTSPOT_FRACTION = 0.1
"""Of the dataset's time: functions below it are not worth a line."""

_INTERVAL_S = 0.003
_PROBES = os.path.dirname(__file__) + os.sep
_CALLERS = (_PROBES + "sample_cost.py", _PROBES + "sample_calls.py")
"""All other probes are called in the middle of the user's code: for an operation, a signal, an audit event."""
_TRIALS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "trials") + os.sep
_FEEDS = (_TRIALS + "program_loops.py", _TRIALS + "batch_source.py")
"""What calls loaders, for the program."""
_LEAST_LOOKS = 10
_SHOWN = 5


class _Place(NamedTuple):
    """Where a thread is in the user's program."""

    file: str
    line: int
    function: str
    calls: str
    """The library's function that the line calls."""

    is_called: bool = False
    """Whether penstock calls it: what makes batches in this process, a sampler or a collate function."""


class LineSampler:
    """Looks at the main thread, from `start` to `stop` or in a `with` block, if the main thread starts it."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self.looks = 0
        """How often it has looked."""
        self._seconds: dict[_Place | None, float] = {}
        self._turns: dict[_Place | None, set[int]] = {}
        self._timer = TimerSignal(_INTERVAL_S, self.look, place=1)
        self._is_on = self._is_looking = False
        self._looked_at = 0.0
        self.turn = 0
        """The number of what the thread does now, a sample or a step: a line may be seen in many of them, or in one."""
        self.is_paused = False
        """Whether the thread does something else now, whose time counts for nothing."""

    def start(self) -> None:
        """Begin to look; may be called again."""
        if not self._is_on:
            self._looked_at = time.perf_counter()
            self._is_on = self._timer.start()

    def stop(self) -> None:
        """Look no more; may be called again, and before `start`."""
        if self._is_on:
            self._is_on = False
            self._timer.stop()

    def __enter__(self) -> LineSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def lines(self) -> tuple[HotLine, ...]:
        """Return the lines that were seen most often; empty if it has hardly looked."""
        return self._lines(filter(None, self._seconds), sum(self._seconds.values()))

    def lines_of_program(self, *, called: bool = False) -> tuple[HotLine, ...]:
        """Return the lines of what a program does by itself, as fractions of its time, or of what penstock `called`."""
        places = [place for place in self._seconds if place is not None and place.is_called == called]
        return self._lines(places, sum(self._seconds[place] for place in places))

    def fraction_of(self, file: str, function: str) -> float:
        """Return the fraction of the time that was spent in the lines of a function."""
        seen_s = sum(
            seconds
            for place, seconds in self._seconds.items()
            if place and (place.file, place.function) == (file, function)
        )
        return seen_s / sum(self._seconds.values()) if self.looks >= _LEAST_LOOKS else 0.0

    def look(self, number: int, frame: FrameType | None) -> None:
        """Note where the thread is; the signal's handler."""
        if self._is_looking or not self._is_on:
            return
        self._is_looking = True
        try:
            before, self._looked_at = self._looked_at, time.perf_counter()
            if not self.is_paused:
                place = _place(frame)
                # All of the time since the last look: a call into C is only interrupted when it returns.
                self._seconds[place] = self._seconds.get(place, 0.0) + self._looked_at - before
                self._turns.setdefault(place, set()).add(self.turn)
                self.looks += 1
        finally:
            self._is_looking = False

    def _lines(self, places: Iterable[_Place], total_s: float) -> tuple[HotLine, ...]:
        if self.looks < _LEAST_LOOKS or not total_s:
            return ()
        turns = len(set[int]().union(*self._turns.values()))
        lines: dict[tuple[str, int], list[_Place]] = {}
        for place in sorted(places, key=lambda place: -self._seconds[place]):
            lines.setdefault(place[:2], []).append(place)  # the call that takes the most of a line's time comes first
        seen = [
            HotLine(
                line=line_text(*line),
                calls=places[0].calls,
                fraction=sum(self._seconds[place] for place in places) / total_s,
                turns_fraction=len(set[int]().union(*(self._turns[place] for place in places))) / turns,
            )
            for line, places in lines.items()
        ]
        largest = sorted(seen, key=lambda line: -line.fraction)[:_SHOWN]
        return tuple(line for line in largest if line.fraction >= _HOTSPOT_FRACTION)


def _place(frame: FrameType | None) -> _Place | None:
    """Return the innermost line of the user's own, and the library function that it calls."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PROBES) and code.co_filename not in _CALLERS:
            frame = frame.f_back
            continue
        if code.co_filename.startswith(PACKAGE_FOLDER):
            return None
        if is_users(code.co_filename):
            return _Place(code.co_filename, _line_of(frame), code.co_qualname, called, _is_called(frame))
        if not code.co_filename.startswith("<"):
            called = f"{frame.f_globals.get('__name__', '')}.{code.co_qualname}"
        frame = frame.f_back
    return None


def _is_called(frame: FrameType | None) -> bool:
    """Return whether penstock calls a function of the user's to make a batch, rather than the program by itself."""
    while frame is not None and not frame.f_code.co_filename.startswith(_FEEDS):
        frame = frame.f_back
    return frame is not None


def _line_of(frame: FrameType) -> int:
    """Return the line that a frame is at; instructions that Python adds, such as those of a `for`, may have none."""
    if frame.f_lineno is not None:
        return frame.f_lineno
    before = [line for start, _, line in frame.f_code.co_lines() if line is not None and start <= frame.f_lasti]
    return before[-1] if before else frame.f_code.co_firstlineno


def find_line(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Return the file, the number and the function of the innermost line of the user's own; None without one."""
    place = _place(frame)
    return None if place is None else (place.file, place.line, place.function)
