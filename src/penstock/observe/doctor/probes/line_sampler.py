"""Which lines of the user's program a sample spends its time in, and what each of them calls.

A second thread looks at the stack of the first every few milliseconds. Unlike a profiler it sees lines, and it does not
make cheap calls look expensive; what a line waits for counts like what it computes.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Container
from types import FrameType

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes.step_calls import NOT_THE_USERS, OBSERVER
from penstock.observe.doctor.thresholds import THRESHOLDS

_INTERVAL_S = 0.003
_SWITCH_INTERVAL_S = 1e-4
"""How long a look waits for Python's lock. In Python's own 5 ms a line that computes would have ended before the look,
and the next line that reads a file, which gives up the lock, is seen in its place."""
_LEAST_LOOKS = 10
_SHOWN = 3

_Place = tuple[str, int, str]


class LineSampler:
    """Looks at the thread that made it, from `start` to `stop` or inside a `with` block."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._looks = 0
        self._seconds: dict[_Place | None, float] = {}
        self._turns: dict[_Place | None, set[int]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._switch_interval_s = 0.0
        self.turn = 0
        """The number of what the thread does now, a sample or a step: a line may be seen in many of them, or in one."""

    def start(self) -> None:
        """Begin to look; may be called again."""
        if self._thread is None:
            self._switch_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._thread = threading.Thread(target=self._run, daemon=True, name="penstock-lines")
            self._thread.start()

    def stop(self) -> None:
        """Look no more; may be called again, and before `start`."""
        if self._thread is not None and not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            sys.setswitchinterval(self._switch_interval_s)

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

    def _run(self) -> None:
        looked_at = time.perf_counter()
        while not self._ended.wait(_INTERVAL_S):
            place = _place(sys._current_frames().get(self._thread_id))
            before, looked_at = looked_at, time.perf_counter()
            # All of the time since the last look: a call that keeps Python's lock is only seen when it returns.
            self._seconds[place] = self._seconds.get(place, 0.0) + looked_at - before
            self._turns.setdefault(place, set()).add(self.turn)
            self._looks += 1


def _place(frame: FrameType | None) -> _Place | None:
    """Return the innermost line of the user's own, and the library function that it calls."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == OBSERVER:  # looks at the operations of the program's step, which lie inside of it
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


def line_text(file: str, number: int) -> str:
    """Return a line with its file's name and its number."""
    text = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}:{number}: {text}" if text else f"{os.path.basename(file)}:{number}"
