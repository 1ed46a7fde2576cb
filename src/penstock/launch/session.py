"""What `penstock run` keeps of a run from its start to its end, and who is told what."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import platform
import signal
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
from penstock.launch.keeper import Keeper
from penstock.launch.outputs import Outputs
from penstock.launch.parts import Parts
from penstock.observe import lines
from penstock.observe.beacon import Beacon, living, private_folder
from penstock.observe.clock import read_clock
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.lookout import Lookout
from penstock.observe.machine import machine
from penstock.observe.pulse import Pulse
from penstock.observe.record import RunRecord
from penstock.observe.terminal import StatusRows
from penstock.observe.timeline import Timeline
from penstock.observe.watch import Watch
from penstock.observe.watcher import Watcher

if TYPE_CHECKING:
    from penstock.feed.loader import DataLoader
    from penstock.observe.prometheus import Endpoint

_INTERRUPTED = 128 + signal.SIGINT
_STDERR = 2
_PLAIN_S = 5.0
_KEEP_S = 2.0
_KEEP_SHARE = 1 / 1000
"""Writing what would be left if this process were killed takes at most this share of its time."""


class Session:
    """One process of a run.

    Args:
        command: what is run.
        outputs: what is printed and written.
        ranks: which of the run's processes this is.
        comparison: with torch's own loader, where one was asked for.
        tune: whether loaders find their number of workers by themselves.
    """

    def __init__(
        self,
        command: Sequence[str],
        outputs: Outputs,
        ranks: Ranks,
        comparison: Comparison | None = None,
        *,
        tune: bool = False,
    ) -> None:
        self._command = tuple(command)
        self._outputs = outputs
        self._tune = tune
        self._ranks = ranks
        self._comparison = comparison
        self._watch = Watch(traced=outputs.trace_file is not None)
        self._endpoint = _endpoint(self._watch, outputs)
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
        self._clock = read_clock()
        shows = not self._outputs.quiet and self._ranks.local_rank == 0
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
        parts, outputs = Parts(folder, self._ranks), self._outputs
        self._beacon, self._parts = Beacon(folder), parts
        parts.begin()
        living(folder)  # which removes what runs that were killed have left

        def afterwards() -> None:
            end = parts.end(None)
            if end.record is not None:
                ending.write(end.record, outputs, is_last=end.is_last)
            if end.is_last:
                parts.remove()

        self._keeper = Keeper.start(self._beacon.file, afterwards, draws=draws)

    def notice(self, loader: DataLoader[Any]) -> None:
        """Watch a loader that the program has made."""
        if os.getpid() == self._pid:  # else this is a child that the program has forked
            if self._tune:
                from penstock.feed.loader import make_auto  # the program has imported torch by now

                make_auto(loader)
            self._watch.notice(loader)
            self._watcher.start()
            if self._endpoint is not None:
                self._endpoint.start()

    def forget(self) -> None:
        """Report nothing: there was no program."""
        atexit.unregister(self._end)
        if self._parts is not None and self._parts.end(None).is_last:
            self._parts.remove()
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
        ending.write(record, self._outputs, is_last=is_last)
        if self._parts is not None and is_last:
            self._parts.remove()
        ending.write_trace(self._watch, self._clock, self._outputs)
        self._close()
        if self.exit_code == _INTERRUPTED:
            _stay_interrupted()

    def _close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        if self._beacon is not None:
            self._beacon.close()
        if self._keeper is not None:
            self._keeper.dismiss()

    def _record(self, *, exit_code: int | None) -> RunRecord:
        return RunRecord(
            command=self._command,
            started=self._started,
            began_unix_ns=self._clock.unix_ns,
            wall_s=time.perf_counter() - self._began,
            exit_code=exit_code,
            error=self.error,
            versions={"penstock": __version__, "python": platform.python_version(), "torch": _torch_version()},
            cpus=usable_cores(),
            machine=machine(),
            memory=self._memory.peak(),
            loaders=tuple(loader.record() for loader in list(self._watch.loaders)),
            timeline=self._timeline.moments(),
            baseline=self._comparison.result() if self._comparison is not None else None,
        )


def _endpoint(watch: Watch, outputs: Outputs) -> Endpoint | None:
    """Take the port, if there is to be one; import what serves it only then."""
    if outputs.prometheus_port is None:
        return None
    from penstock.observe.prometheus import Endpoint

    endpoint = Endpoint(watch, outputs.prometheus_port)
    if not outputs.quiet:
        print(f"penstock: live numbers at http://127.0.0.1:{endpoint.port}/metrics", file=sys.stderr)
    return endpoint


def _stay_interrupted() -> None:
    """Let Python still end by SIGINT after exit handlers that have imported something.

    It remembers an unhandled KeyboardInterrupt in a flag that every `exec` of a string clears or sets, and making a
    dataclass or a named tuple is one. Source: `run_eval_code_obj` in CPython's pythonrun.c.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _torch_version() -> str | None:
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)  # it may be half imported
    return None if version is None else str(version)
