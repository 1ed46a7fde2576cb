"""StopSignals: notes the signals by which a scheduler says that it will end this process soon."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from penstock.core.errors import OptionError

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)  # Windows has no SIGUSR1


class StopSignals:
    """Notes the signals `numbers` until `close`. A handler that the program had is called too.

    A process that is forked has the handlers of before: loader workers end by SIGTERM as without this.

    Args:
        numbers: the signals.
        on_signal: called by the handler. It must not take a lock.

    Raises:
        OptionError: this is not the main thread, or a signal cannot be caught, or not be chained.
    """

    def __init__(self, numbers: Iterable[int], on_signal: Callable[[], object]) -> None:
        self.noted = False
        """Whether one has come."""
        self._on_signal = on_signal
        self._process = os.getpid()
        self._is_active = True
        self._earlier: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "Python sets signal handlers in the main thread only, and this is "
                f"{threading.current_thread().name}; make the first call in the main thread"
            )
        for number in numbers:
            if number == signal.SIGINT:
                self.close()
                raise OptionError("SIGINT is Ctrl-C, which ends a program at once; use signals= without it")
            try:
                earlier = signal.getsignal(number)
                if earlier is None:
                    raise ValueError("it has a handler that is not Python's, and could not be called")
                signal.signal(number, self._handle)
            except (OSError, ValueError, TypeError) as error:
                self.close()
                raise OptionError(f"signal {number!r} cannot be watched: {error}; use signals= without it") from error
            self._earlier[number] = earlier
            owner = _owner(earlier)
            self.noted |= owner is not None and owner._is_active and owner.noted

    def close(self) -> None:
        """Restore the handlers of before.

        One that somebody else's handler calls by now, or that is not closed in the main thread, does nothing more than
        what would have happened without it.
        """
        self._is_active = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._earlier:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._before(number))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before(number)
        is_own = self._is_active and os.getpid() == self._process
        if is_own:
            self.noted = True
            self._on_signal()
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not is_own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _before(self, number: int) -> Any:
        """Return what handled a signal before this and others that are closed."""
        before = self._earlier[number]
        owner = _owner(before)
        return before if owner is None or owner._is_active else owner._before(number)


def _owner(handler: Any) -> StopSignals | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignals) else None
