"""One process of `penstock run`, from its start to its report: creates the parts, starts them and stops them."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.core.errors import OptionError
from penstock.core.host import usable_cores
from penstock.core.ranks import Ranks
from penstock.core.urls import redact_command
from penstock.launch import finalize
from penstock.launch.live_output import LiveOutput
from penstock.launch.outputs import Outputs
from penstock.launch.rank_files import RankFiles
from penstock.launch.supervisor import Supervisor
from penstock.observe.live.loader_registry import LoaderRegistry
from penstock.observe.live.poller import RunPoller
from penstock.observe.live.poller_thread import PollerThread
from penstock.observe.live.status_file import StatusFile, active_runs, private_folder
from penstock.observe.live.terminal import StatusRows
from penstock.observe.meters.clock import read_clock
from penstock.observe.meters.device_meter import DeviceMeter
from penstock.observe.meters.host_memory import MemoryMeter
from penstock.observe.meters.machine import describe_machine
from penstock.observe.record.run_record import RunRecord
from penstock.observe.record.timeline import Timeline

if TYPE_CHECKING:
    from penstock.launch.baseline_run import BaselineRun
    from penstock.loader.counters import Counters
    from penstock.observe.live.prometheus import Endpoint

_INTERRUPTED = 128 + signal.SIGINT
_STDERR = 2


class Session:
    """One process of a run. Call order: constructor, `begin`, then `register` for each loader.

    Its exit handler writes the report.

    Args:
        command: what is run.
        outputs: what to print and write.
        ranks: this process's rank.
        baseline: the comparison with torch's own loader, with `--baseline`.
        tune: whether loaders choose their number of workers themselves.
    """

    def __init__(
        self,
        command: Sequence[str],
        outputs: Outputs,
        ranks: Ranks,
        baseline: BaselineRun | None = None,
        *,
        tune: bool = False,
    ) -> None:
        self._command = redact_command(command)
        self._outputs = outputs
        self._tune = tune
        self._ranks = ranks
        self._baseline = baseline
        self._pid = os.getpid()
        self._clock = read_clock()
        self._registry = LoaderRegistry(record_events=outputs.trace_file is not None)
        self._endpoint = _open_endpoint(self._registry, outputs)
        self._memory = MemoryMeter()
        self._timeline = Timeline()
        self._status_file: StatusFile | None = None
        self._rank_files: RankFiles | None = None
        self._supervisor: Supervisor | None = None
        self._poller_thread: PollerThread | None = None
        self._devices: DeviceMeter | None = None
        self._load = os.getloadavg()[0]
        self._forks = mmap.mmap(-1, mmap.PAGESIZE)
        """Shared with child processes that the program forks: each that makes a loader sets a byte."""
        self.exit_code = 0
        self.error: str | None = None

    def begin(self) -> None:
        """Start the supervisor. Called before the program begins, while this process has one thread."""
        is_visible = not self._outputs.quiet and self._ranks.local_rank == 0
        draws = is_visible and StatusRows.fits(_STDERR)
        with contextlib.suppress(OptionError):  # without a private folder there is no `penstock watch` and no panel
            self._begin_files(private_folder(), draws=draws)
        has_panel = draws and self._supervisor is not None
        live_output = LiveOutput(
            self._status_file,
            self._rank_files,
            lambda: self._record(exit_code=None),
            prints_lines=is_visible and not has_panel,
        )
        # After the fork of the supervisor: the meter loads the GPU's driver library.
        self._devices = DeviceMeter()
        poller = RunPoller(
            self._registry,
            self._memory,
            command=self._command,
            began=self._clock.monotonic_ns / 1e9,
            rank=(self._ranks.rank, self._ranks.world_size),
            launch=self._ranks.launch,
            devices=self._devices,
        )
        self._poller_thread = PollerThread(poller, self._memory, self._timeline, live_output.write)
        atexit.register(self._end)

    def register(self, loader: Any) -> None:
        """Add a loader that the program has made."""
        if os.getpid() != self._pid:  # a child that the program has forked
            self._forks[os.getpid() % mmap.PAGESIZE] = 1
            return
        assert self._poller_thread is not None
        if self._tune:
            from penstock.loader.dataloader import can_autoscale, enable_autoscaling  # torch is imported by now

            if can_autoscale(loader):
                enable_autoscaling(loader, asked=loader.num_workers)
        self._registry.register(loader)
        self._poller_thread.start()
        if self._endpoint is not None:
            self._endpoint.start()

    def find_counters(self, loader: Any, iterator: Any) -> Counters | None:
        """Return the counters for an iterator that is not penstock's; None in a child that the program has forked."""
        if os.getpid() != self._pid:
            self._forks[os.getpid() % mmap.PAGESIZE] = 1
            return None
        if self._registry.find(loader) is None:
            self.register(loader)
        return self._registry.find_counters(loader, iterator)

    def discard(self) -> None:
        """End without a report: there was no program to run."""
        atexit.unregister(self._end)
        if self._rank_files is not None and self._rank_files.end(None).is_last:
            self._rank_files.remove()
        self._close()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_files(self, folder: Path, *, draws: bool) -> None:
        rank_files, outputs = RankFiles(folder, self._ranks), self._outputs
        self._status_file, self._rank_files = StatusFile(folder), rank_files
        rank_files.begin(self._record(exit_code=None))
        active_runs(folder)  # removes the files of runs that were killed

        def finish_killed_run() -> None:
            final = rank_files.end(None)
            if final.is_last and final.record is not None:
                finalize.write_outputs(final.record, outputs, is_last=True)
            if final.is_last:
                rank_files.remove()

        self._supervisor = Supervisor.start(self._status_file.path, rank_files.keep, finish_killed_run, draws=draws)

    def _end(self) -> None:
        """Write the report; the exit handler."""
        if os.getpid() != self._pid:
            return
        if self._poller_thread is not None:
            self._poller_thread.stop()
        if self._supervisor is not None:
            self._supervisor.release_terminal()
        record, is_last = self._record(exit_code=self.exit_code), True
        if self._rank_files is not None:
            final = self._rank_files.end(record)
            record, is_last = final.record or record, final.is_last
        if is_last or self._supervisor is None:
            # Otherwise the last one writes, or its supervisor: what a slower rank wrote might replace that.
            finalize.write_outputs(record, self._outputs, is_last=is_last)
        if self._rank_files is not None and is_last:
            self._rank_files.remove()
        finalize.write_trace_file(self._registry, self._clock, self._outputs)
        self._close()
        if self.exit_code == _INTERRUPTED:
            _stay_interrupted()

    def _close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        if self._status_file is not None:
            self._status_file.close()
        if self._supervisor is not None:
            self._supervisor.dismiss()

    def _record(self, *, exit_code: int | None) -> RunRecord:
        return RunRecord(
            command=self._command,
            started=self._clock.iso_time(),
            started_unix_ns=self._clock.unix_ns,
            wall_s=self._clock.elapsed_s(),
            exit_code=exit_code,
            error=self.error,
            versions={"penstock": __version__, "python": platform.python_version(), "torch": _torch_version()},
            cpus=usable_cores(),
            machine=describe_machine(),
            memory=self._memory.peak(),
            device_memory=self._devices.peak() if self._devices is not None else None,
            load=self._load,
            forks_with_loaders=sum(self._forks[:]),
            children_cpu_s=sum(os.times()[2:4]),
            loaders=self._registry.records(),
            timeline=self._timeline.points(),
            baseline=self._baseline.result() if self._baseline is not None else None,
        )


def _open_endpoint(registry: LoaderRegistry, outputs: Outputs) -> Endpoint | None:
    """Open the Prometheus endpoint, if one is wanted; otherwise nothing of it is imported."""
    if outputs.prometheus_port is None:
        return None
    from penstock.observe.live.prometheus import Endpoint

    endpoint = Endpoint(registry, outputs.prometheus_port)
    if not outputs.quiet:
        print(f"penstock: live numbers at http://127.0.0.1:{endpoint.port}/metrics", file=sys.stderr)
    return endpoint


def _stay_interrupted() -> None:
    """Make Python still end by SIGINT after exit handlers that have imported something.

    CPython keeps an unhandled KeyboardInterrupt in a flag that every `exec` of a string clears or sets, and creating a
    dataclass or a named tuple is such an `exec`. Source: `run_eval_code_obj` in CPython's pythonrun.c.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _torch_version() -> str | None:
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)  # missing while torch is being imported
    return None if version is None else str(version)
