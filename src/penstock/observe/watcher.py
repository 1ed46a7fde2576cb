"""The thread that looks at a run, now and then, and hands on what it saw."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from penstock.observe.host_memory import MemoryMeter
from penstock.observe.lookout import Lookout
from penstock.observe.pulse import Pulse
from penstock.observe.timeline import Timeline

_LOOK_S = 0.5


class Watcher:
    """Looks twice a second, keeps the timeline and the peak of memory.

    It is started when there is a loader: Python warns who forks beside a thread, and many a script has no loader.

    Args:
        lookout: used by the thread alone, until `stop`.
        memory: told to look as often as it may.
        timeline: gets a moment when one is due.
        tell: called with every pulse, in the thread. It must hold no lock that a forked child could need.
    """

    def __init__(
        self, lookout: Lookout, memory: MemoryMeter, timeline: Timeline, tell: Callable[[Pulse], None]
    ) -> None:
        self._lookout = lookout
        self._memory = memory
        self._timeline = timeline
        self._tell = tell
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, unless it has begun."""
        if self._thread is None and not self._stop.is_set():
            self._lookout.begin()
            thread = threading.Thread(target=self._run, name="penstock-watcher", daemon=True)
            with contextlib.suppress(RuntimeError):  # Python starts no thread when its main one has ended
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """Look a last time, and no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._memory.look()
        if self._thread is not None:
            self._timeline.add(self._lookout.look().moment)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self._memory.look_if_due()
            pulse = self._lookout.look()
            if self._timeline.is_due(pulse.moment.at_s):
                self._timeline.add(pulse.moment)
            self._tell(pulse)
