"""The streams of the simulated devices of one machine, and what runs their operations: a thread, or a test by hand.

A capture is a property of a thread. What waits for everything, or puts an event behind everything, breaks a capture of
any thread, as CUDA's context-wide calls do; `captures_broken` counts that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_IDLE_S = 0.2
"""The engine's thread ends after this time without an operation; the next operation starts another."""


@dataclass(eq=False)
class _Operation:
    run: Callable[[], None]
    ready: Callable[[], bool]
    seconds: float = 0.0


@dataclass(eq=False)
class SimStream:
    """Operations that run one after another."""

    name: str
    queue: deque[_Operation] = field(default_factory=deque)


class SimEvent:
    """Passes when the operation that records it runs, on each of its streams; see `base.Event`."""

    def __init__(self, engine: Engine, parts: int = 1) -> None:
        self._engine = engine
        self._left = parts
        self._is_closed = False

    def query(self) -> bool:
        """Return whether it has passed."""
        return self._left <= 0

    def synchronize(self) -> None:
        """Wait until it has passed."""
        self._engine.wait(self.query)

    def close(self) -> None:
        """Do nothing, but refuse it twice: the device would have two owners of one event."""
        assert not self._is_closed, "an event was closed twice"
        self._is_closed = True

    def _pass(self) -> None:
        self._left -= 1


class SimMark(SimEvent):
    """Keeps when it passed; see `base.Mark`."""

    passed_s = 0.0

    def elapsed_time(self, later: SimMark) -> float:
        """Return the milliseconds from it to a later mark."""
        return (later.passed_s - self.passed_s) * 1e3

    def _pass(self) -> None:
        self.passed_s = time.perf_counter()
        super()._pass()


class Engine:
    """Runs the operations of all devices of a machine.

    Args:
        by_hand: whether operations run only in `step`; else a thread runs them as time passes.
    """

    def __init__(self, *, by_hand: bool) -> None:
        self.streams: list[SimStream] = []
        self.changed = threading.Condition(threading.RLock())
        self.capturing: set[int] = set()
        """The threads that capture a graph."""
        self.captures_broken = 0
        self.postponed: deque[Callable[[], object]] = deque()
        """What would break a capture, and is done after it."""
        self._by_hand = by_hand
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def stream(self, name: str) -> SimStream:
        """Return a new stream."""
        with self.changed:
            self.streams.append(SimStream(name))
            return self.streams[-1]

    def record(self, streams: Sequence[SimStream]) -> SimEvent:
        """Return an event behind what these streams have been given."""
        with self.changed:
            event = SimEvent(self, parts=len(streams))
            for stream in streams:
                self.submit(stream, event._pass)
        return event

    def mark(self, stream: SimStream) -> SimMark:
        """Return a mark behind what a stream has been given."""
        mark = SimMark(self)
        self.submit(stream, mark._pass)
        return mark

    def record_all(self) -> SimEvent:
        """Return an event behind everything. It breaks the captures that are under way."""
        with self.changed:
            self.captures_broken += len(self.capturing)
            return self.record(self.streams)

    def submit(
        self,
        stream: SimStream,
        run: Callable[[], None],
        *,
        ready: Callable[[], bool] = lambda: True,
        seconds: float = 0.0,
    ) -> None:
        """Append an operation, which takes so many seconds of the link, and begins when `ready`."""
        with self.changed:
            stream.queue.append(_Operation(run, ready, seconds))
            if not self._by_hand and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="penstock-sim", daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def runnable(self) -> list[SimStream]:
        """Return the streams whose next operation could run now."""
        with self.changed:
            return [stream for stream in self.streams if stream.queue and stream.queue[0].ready()]

    def step(self, stream: SimStream | None = None) -> bool:
        """Run one operation, of `stream` or of any; return whether there was one."""
        with self.changed:
            ready = self.runnable() if stream is None else [one for one in self.runnable() if one is stream]
            if not ready:
                return False
            ready[0].queue.popleft().run()
            return True

    def wait(self, passed: Callable[[], bool]) -> None:
        """Wait until `passed`; by hand, run what can run until then."""
        if not self._by_hand:
            with self.changed:
                self.changed.wait_for(lambda: passed() or self._error)
            if self._error is not None:
                raise self._error
            return
        while not passed():
            if not self.step():
                raise RuntimeError("this event can never pass: every stream waits for another one")

    def _work(self) -> None:
        """Run operations as time passes, until there were none for `_IDLE_S`."""
        while True:
            with self.changed:
                if not self.changed.wait_for(self.runnable, timeout=_IDLE_S):
                    self._thread = None
                    return
                stream = self.runnable()[0]
                seconds = stream.queue[0].seconds
            if seconds:
                time.sleep(seconds)  # the link is busy; streams may be appended to meanwhile
            with self.changed:
                try:
                    stream.queue.popleft().run()
                except Exception as error:  # noqa: BLE001  a kernel's; raised by the next wait
                    self._error = self._error or error
                self.changed.notify_all()
