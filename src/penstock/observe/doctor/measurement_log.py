"""Runs measurements within a time limit, and keeps a note of each one that could not be made."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.core.user_code import is_users
from penstock.observe.doctor.probes.time_limit import time_limit

_Result = TypeVar("_Result")
_OVERRUN = 1.1
_LEAST_S = 0.5


class _TimeLimitError(BaseException):
    """A measurement took too long. No dataset catches it by mistake, because it is no `Exception`."""


class MeasurementLog:
    """Notes on what could not be measured, and why."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._until = math.inf

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each measurement that could not be made."""
        return tuple(self._lines)

    def add(self, note: str) -> None:
        """Keep a line."""
        self._lines.append(note)

    def limit(self, seconds: float) -> None:
        """Let all measurements from now on end within `seconds`, with some tolerance."""
        self._until = time.perf_counter() + seconds * _OVERRUN + 0.5

    def attempt(
        self, what: str, measure: Callable[[], _Result], seconds: float, *, least_s: float = _LEAST_S
    ) -> _Result | None:
        """Return what `measure` returns, or None, with a note, if it fails or takes much longer than `seconds`.

        It gets `least_s` however little of the time is left.
        """
        limit_s = min(max(least_s, self._until - time.perf_counter()), seconds * _OVERRUN + 1.0)
        try:
            with time_limit(limit_s, _TimeLimitError):
                return measure()
        except _TimeLimitError:
            self.add(f"{what}: took longer than {limit_s:.1f} s; give more --seconds")
        except Exception as error:
            self.add(f"{what}: {describe_error(error)}")
        return None


def describe_error(error: BaseException) -> str:
    """Return an exception in one line, with the line of the user's own code that raised it."""
    frames = traceback.extract_tb(error.__traceback__) if error.__traceback__ is not None else []
    own = [frame for frame in frames if is_users(frame.filename)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = str(error).strip().splitlines()[-1:] or [""]
    kind = type(error).__name__
    return f"{text[0] if text[0].startswith(kind) else f'{kind}: {text[0]}'}{where}"
