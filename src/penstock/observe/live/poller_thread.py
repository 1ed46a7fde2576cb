"""The thread that polls a run twice a second and passes each snapshot on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.live.poller import RunPoller
from penstock.observe.meters.host_memory import MemoryMeter
from penstock.observe.record.timeline import Timeline

_PERIOD_S = 0.5


class PollerThread:
    """Polls twice a second, keeps the timeline and the peak of memory.

    It starts with the first loader: Python warns about a fork beside a thread, and many scripts have no loader.

    Args:
        poller: used by this thread alone until `stop`.
        memory: measured as often as its own budget allows.
        timeline: gets a point when one is due.
        on_snapshot: called with every snapshot, in the thread. It must not take a lock that a forked child needs.
    """

    def __init__(
        self, poller: RunPoller, memory: MemoryMeter, timeline: Timeline, on_snapshot: Callable[[LiveSnapshot], None]
    ) -> None:
        self._poller = poller
        self._memory = memory
        self._timeline = timeline
        self._on_snapshot = on_snapshot
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is None and not self._stop.is_set():
            self._poller.restart_window()
            thread = threading.Thread(target=self._run, name="penstock-poller", daemon=True)
            with contextlib.suppress(RuntimeError):  # Python starts no thread after its main thread has ended
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """End the thread, then poll a last time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._memory.measure()
        if self._thread is not None:
            self._timeline.add(self._poller.poll().now)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._memory.measure_if_due()
            snapshot = self._poller.poll()
            if self._timeline.is_due(snapshot.now.at_s):
                self._timeline.add(snapshot.now)
            self._on_snapshot(snapshot)
