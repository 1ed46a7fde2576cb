"""Which lines of the user's program a sample spends its time in, and what each of them calls.

A timer's signal interrupts the main thread every few milliseconds, between two instructions of Python's, and its
handler looks at the stack. Unlike a profiler it sees lines, and it does not make cheap calls look expensive; what a
line waits for counts like what it computes. (A second thread that looks gets Python's lock where the first one gives it
up, in a line that reads or calls torch, and sees short samples there only.)
"""

from __future__ import annotations

import linecache
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.core.object_attributes import values_of
from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes.source_lines import is_random, is_same_for_all, line_text
from penstock.observe.doctor.probes.steps.call_statements import (
    Reached,
    call_statement,
    is_users,
    looks_like_call,
    reached_by,
)
from penstock.observe.doctor.probes.steps.functions_around import FunctionsAround
from penstock.observe.doctor.probes.steps.step_calls import NOT_THE_USERS
from penstock.observe.doctor.step_results import CallStatement
from penstock.observe.doctor.thresholds import THRESHOLDS

_INTERVAL_S = 0.003
_CHAIN_S = 0.25
"""How often the handler that was there before is called, such as a time limit's."""

_PROBES = os.path.dirname(__file__) + os.sep
_CALLERS = (_PROBES + "sample_cost.py", _PROBES + "sample_calls.py")
"""All other probes are called in the middle of the user's code: for an operation, a signal, an audit event, a lock."""
_TRIALS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "trials") + os.sep
_FEEDS = (_TRIALS + "program_loops.py", _TRIALS + "batch_source.py")
"""What calls loaders, for the program."""
_LEAST_LOOKS = 10
_SHOWN = 5


class _Place(NamedTuple):
    """Where a thread is in the user's program."""

    file: str
    line: int
    calls: str
    """The library's function that the line calls."""

    is_called: bool = False
    """Whether penstock calls it: what makes batches in this process, a sampler or a collate function."""


@dataclass(slots=True)
class _Around:
    """What passes in a line and beneath it."""

    seconds: float = 0.0
    looks: int = 0
    turns: set[int] = field(default_factory=set)
    calls: dict[str, float] = field(default_factory=dict)
    reached: Reached | None = None

    def note(self, seconds: float, turn: int, calls: Mapping[str, float]) -> None:
        self.seconds += seconds
        self.looks += 1
        self.turns.add(turn)
        for called, own_s in calls.items():
            self.calls[called] = self.calls.get(called, 0.0) + own_s


class LineSampler:
    """Looks at the thread that made it, from `start` to `stop` or in a `with` block, if the main thread starts it.

    Args:
        counts_values: whether it also looks at how large the arrays are that a function has. Until a function returns,
            Python then keeps what its variables held, which is too long for a step.
    """

    def __init__(self, *, counts_values: bool = False) -> None:
        self._counts_values = counts_values
        self._thread_id = threading.get_ident()
        self.looks = 0
        """How often it has looked."""
        self._seconds: dict[_Place | None, float] = {}
        self._turns: dict[_Place | None, set[int]] = {}
        self._values: dict[_Place | None, int] = {}
        self._around: dict[tuple[str, int], _Around] = {}
        self._functions = FunctionsAround()
        self._is_on = self._is_looking = False
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

    def lines(self) -> tuple[HotLine, ...]:
        """Return the lines that were seen most often; empty if it has hardly looked."""
        return self._lines(filter(None, self._seconds), sum(self._seconds.values()))

    def lines_of_program(self, loading: Reached | None = None, *, called: bool = False) -> tuple[HotLine, ...]:
        """Return the lines of what a program does by itself, as fractions of its time, or of what penstock `called`.

        `loading` are the objects that batches are made of.
        """
        places = [place for place in self._seconds if place is not None and place.is_called == called]
        return self._lines(places, sum(self._seconds[place] for place in places), loading)

    def part_of_program(self, lines: Mapping[str, Container[int]]) -> HotLine | None:
        """Return the time of these lines together, by file, as a line of a program; it names the longest of them."""
        own = [place for place in self._seconds if place is not None and not place.is_called]
        among = [place for place in own if place.line in lines.get(place.file, ())]
        if self.looks < _LEAST_LOOKS or not among:
            return None
        seconds: dict[tuple[str, int], float] = {}
        for place in among:
            seconds[place[:2]] = seconds.get(place[:2], 0.0) + self._seconds[place]
        return HotLine(
            line=line_text(*max(seconds, key=lambda line: seconds[line])),
            fraction=sum(seconds.values()) / sum(self._seconds[place] for place in own),
        )

    def call_statements(self, loading: Reached) -> tuple[CallStatement, ...]:
        """Return the statements of a program that call something and drop the result, largest first.

        Only those of which it is known that they reach nothing of what batches are made of, `loading`.
        """
        total_s = sum(seconds for place, seconds in self._seconds.items() if place is not None and not place.is_called)
        found: dict[tuple[str, range], list[_Around]] = {}
        for line, one in self._around.items():
            is_apart = one.reached is not None and one.reached.is_apart_from(loading)
            statement = call_statement(*line) if is_apart else None
            if statement is not None and one.seconds >= THRESHOLDS.hotspot_fraction * total_s:
                found.setdefault((line[0], statement), []).append(one)
        turns = len(set[int]().union(*self._turns.values()))
        made = [_statement(file, lines, parts, total_s, turns) for (file, lines), parts in found.items()]
        made.reverse()  # of lines that take the same time, the one that calls the others was noted last
        return tuple(sorted(made, key=lambda one: -one.hot.fraction))

    def _look_around(self, frame: FrameType | None, called: str, seconds: float) -> None:
        """Note all lines of the program's own that run, innermost first."""
        seen: set[tuple[str, int]] = set()
        calls = {called: seconds}
        frames: list[FrameType] = []
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                line = frame.f_code.co_filename, _line_of(frame)
                frames.append(frame)
                around = self._around.setdefault(line, _Around())
                if line not in seen:
                    seen.add(line)
                    around.note(seconds, self.turn, calls)
                if around.reached is None and around.looks >= _LEAST_LOOKS:
                    is_call = looks_like_call(linecache.getline(*line).strip())
                    around.reached = reached_by(frame, line[1]) if is_call else Reached(is_unknown=True)
            else:
                calls.setdefault(_function_of(frame), 0.0)
            frame = frame.f_back
        if frames:
            self._functions.note((frames[0].f_code.co_filename, _line_of(frames[0])), frames)

    def _lines(self, places: Iterable[_Place], total_s: float, loading: Reached | None = None) -> tuple[HotLine, ...]:
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
                is_same_for_all=is_same_for_all(*line),
                is_random=is_random(*line),
                values=max(self._values.get(place, 0) for place in places),
                feeds_loader=loading is not None and self._functions.feeds(line, loading),
            )
            for line, places in lines.items()
        ]
        largest = sorted(seen, key=lambda line: -line.fraction)[:_SHOWN]
        return tuple(line for line in largest if line.fraction >= THRESHOLDS.hotspot_fraction)

    def fraction_of(self, file: str, numbers: Container[int]) -> float:
        """Return the fraction of the time that was spent in these lines."""
        seen_s = sum(
            seconds
            for place, seconds in self._seconds.items()
            if place and place.file == file and place.line in numbers
        )
        return seen_s / sum(self._seconds.values()) if self.looks >= _LEAST_LOOKS else 0.0

    def look(self, number: int, frame: FrameType | None) -> None:
        """Note where the thread is; the signal's handler."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            self._look(frame)
        finally:
            self._is_looking = False
        if callable(self._before) and self._looked_at - self._chained_at > _CHAIN_S:
            self._chained_at = self._looked_at
            self._before(number, frame)

    def _look(self, frame: FrameType | None) -> None:
        before, self._looked_at = self._looked_at, time.perf_counter()
        if not self.is_paused:
            if threading.get_ident() != self._thread_id:
                frame = sys._current_frames().get(self._thread_id)
            place, users = _place(frame)
            # All of the time since the last look: a call into C is only interrupted when it returns.
            self._seconds[place] = self._seconds.get(place, 0.0) + self._looked_at - before
            self._turns.setdefault(place, set()).add(self.turn)
            if not self._counts_values and place is not None and not place.is_called:
                self._look_around(users, place.calls, self._looked_at - before)
                self._looked_at = time.perf_counter()
            if self._counts_values:
                self._values[place] = max(self._values.get(place, 0), _most_values(users))
            self.looks += 1


def _place(frame: FrameType | None) -> tuple[_Place | None, FrameType | None]:
    """Return the innermost line of the user's own, the library function that it calls, and its frame."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PROBES) and code.co_filename not in _CALLERS:
            frame = frame.f_back
            continue
        if code.co_filename.startswith(PACKAGE_FOLDER):
            return None, None
        is_generated = code.co_filename.startswith("<")
        if not is_generated and not code.co_filename.startswith(NOT_THE_USERS):
            return _Place(code.co_filename, _line_of(frame), called, _is_called(frame)), frame
        if not is_generated:
            called = _function_of(frame)
        frame = frame.f_back
    return None, None


def _function_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"


def _statement(file: str, lines: range, parts: Sequence[_Around], total_s: float, turns: int) -> CallStatement:
    """Return what was seen of a statement on each of its lines."""
    calls: dict[str, float] = {}
    for one in parts:
        for called, seconds in one.calls.items():
            calls[called] = calls.get(called, 0.0) + seconds
    return CallStatement(
        hot=HotLine(
            line=line_text(file, lines[0]),
            fraction=sum(one.seconds for one in parts) / total_s,
            turns_fraction=len(set[int]().union(*(one.turns for one in parts))) / turns,
            calls=max(calls, key=lambda called: calls[called]),
        ),
        lines=tuple(line_text(file, number) for number in lines),
        calls=tuple(sorted(filter(None, calls))),
    )


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


def _most_values(frame: FrameType | None) -> int:
    """Return how many numbers the largest array in a function's variables has, without attributes of its object."""
    names = frame.f_locals if frame is not None else {}
    kept = {id(one) for one in values_of(names.get("self"))}
    return max((count_values(one) for one in names.values() if id(one) not in kept), default=0)


def count_values(one: Any) -> int:
    """Return how many numbers an array, a tensor or an image of Pillow's has; 0 for anything else.

    >>> count_values(torch.zeros(2, 3)), count_values([1.0, 2.0])
    (6, 0)
    """
    if isinstance(one, torch.Tensor | np.ndarray):
        return math.prod(one.shape)
    is_image = type(one).__module__.startswith("PIL.") and hasattr(one, "getbands")
    return math.prod(one.size) * len(one.getbands()) if is_image else 0


def find_line(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the file and number of the innermost line of the user's own; None without one."""
    place, _ = _place(frame)
    return None if place is None else place[:2]
