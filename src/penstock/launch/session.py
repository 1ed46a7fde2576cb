"""What `penstock run` keeps of a run from its start to its end, and who is told what."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.core.errors import OptionError
from penstock.core.host import usable_cores
from penstock.core.ranks import Ranks
from penstock.launch import ending
from penstock.launch.compare import Comparison
from penstock.launch.ending import Wanted
from penstock.launch.keeper import Keeper
from penstock.launch.parts import Parts
from penstock.observe import lines
from penstock.observe.beacon import Beacon, living, private_folder
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.lookout import Lookout
from penstock.observe.pulse import Pulse
from penstock.observe.record import RunRecord
from penstock.observe.terminal import StatusRows
from penstock.observe.timeline import Timeline
from penstock.observe.watch import Watch
from penstock.observe.watcher import Watcher

if TYPE_CHECKING:
    from penstock.feed.loader import DataLoader

_STDERR = 2
_PLAIN_S = 5.0
_KEEP_S = 2.0
_KEEP_SHARE = 1 / 1000
"""Writing what would be left if this process were killed takes at most this share of its time."""


class Session:
    """One process of a run.

    Args:
        command: what is run.
        wanted: what is written at the end.
        ranks: which of the run's processes this is.
        comparison: with torch's own loader, where one was asked for.
    """

    def __init__(
        self, command: Sequence[str], wanted: Wanted, ranks: Ranks, comparison: Comparison | None = None
    ) -> None:
        self._command = tuple(command)
        self._wanted = wanted
        self._ranks = ranks
        self._comparison = comparison
        self._watch = Watch()
        self._memory = MemoryMeter()
        self._timeline = Timeline()
        self._beacon: Beacon | None = None
        self._parts: Parts | None = None
        self._keeper: Keeper | None = None
        self._next_line_s = _PLAIN_S
        self._next_part_s = 0.0
        self.exit_code = 0
        self.error: str | None = None

    def begin(self) -> None:
        """Start the clock. To be called before the program begins, while this process has one thread."""
        self._pid = os.getpid()
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._began = time.perf_counter()
        shows = not self._wanted.quiet and self._ranks.local_rank == 0
        draws = shows and StatusRows.fits(_STDERR)
        with contextlib.suppress(OptionError):  # without a folder of one's own: no `penstock watch`, no panel
            self._begin_beacon(private_folder(), draws=draws)
        self._says_lines = shows and not (draws and self._keeper is not None)
        self._lookout = Lookout(
            self._watch,
            self._memory,
            command=self._command,
            began=self._began,
            rank=(self._ranks.rank, self._ranks.world_size),
        )
        self._watcher = Watcher(self._lookout, self._memory, self._timeline, self._tell)
        atexit.register(self._end)

    def _begin_beacon(self, folder: Path, *, draws: bool) -> None:
        parts, wanted = Parts(folder, self._ranks), self._wanted
        self._beacon, self._parts = Beacon(folder), parts
        parts.begin()
        living(folder)  # which removes what runs that were killed have left

        def afterwards() -> None:
            end = parts.end(None)
            if end.record is not None:
                ending.write(end.record, wanted, is_last=end.is_last)

        self._keeper = Keeper.start(self._beacon.file, afterwards, draws=draws)

    def notice(self, loader: DataLoader[Any]) -> None:
        """Watch a loader that the program has made."""
        if os.getpid() == self._pid:  # else this is a child that the program has forked
            self._watch.notice(loader)
            self._watcher.start()

    def forget(self) -> None:
        """Report nothing: there was no program."""
        atexit.unregister(self._end)
        if self._parts is not None:
            self._parts.end(None)
        self._close()

    # ── while it runs, in the watcher's thread ──────────────────────────────────────────────────────────────────

    def _tell(self, pulse: Pulse) -> None:
        at_s = pulse.moment.at_s
        if self._beacon is not None:
            self._beacon.show(pulse)
        if self._says_lines and at_s >= self._next_line_s and pulse.loader:
            self._next_line_s = at_s + _PLAIN_S
            with contextlib.suppress(OSError):  # the log has gone; past Python's locks, which a fork could catch
                os.write(_STDERR, f"penstock: {lines.progress(pulse)}\n".encode())
        if self._parts is not None and at_s >= self._next_part_s:
            began = time.perf_counter()
            self._parts.keep(self._record(exit_code=None))
            after = time.perf_counter()
            self._next_part_s = at_s + max(_KEEP_S, (after - began) / _KEEP_SHARE)

    # ── at its end ──────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> None:
        if os.getpid() != self._pid:
            return
        self._watcher.stop()
        if self._keeper is not None:
            self._keeper.clear()
        record, is_last = self._record(exit_code=self.exit_code), True
        if self._parts is not None:
            end = self._parts.end(record)
            record, is_last = end.record or record, end.is_last
        ending.write(record, self._wanted, is_last=is_last)
        self._close()

    def _close(self) -> None:
        if self._beacon is not None:
            self._beacon.close()
        if self._keeper is not None:
            self._keeper.dismiss()

    def _record(self, *, exit_code: int | None) -> RunRecord:
        return RunRecord(
            command=self._command,
            started=self._started,
            wall_s=time.perf_counter() - self._began,
            exit_code=exit_code,
            error=self.error,
            versions={"penstock": __version__, "python": platform.python_version(), "torch": _torch_version()},
            cpus=usable_cores(),
            memory=self._memory.peak(),
            loaders=tuple(loader.record() for loader in list(self._watch.loaders)),
            timeline=self._timeline.moments(),
            baseline=self._comparison.result() if self._comparison is not None else None,
        )


def _torch_version() -> str | None:
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)  # it may be half imported
    return None if version is None else str(version)
