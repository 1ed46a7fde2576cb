"""Workers with the start method "spawn", forked from one fresh interpreter that has imported torch, the template.

A spawned worker inherits nothing of the training process but what any program inherits: environment, folder, limits,
signals that are ignored. The template is started in the same way, and runs nothing of the program; the program's main
module is imported in each worker after the fork, as always. So a worker is what spawn makes, without the seconds of
importing torch. The template counts only while a worker that is spawned now would inherit the same
(`inherited_state`); otherwise another takes its place. It ends with the training process.

Where there is no template (other systems, a template that has died), workers are spawned as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing.context
import os
import signal
import socket
import sys
import threading
from multiprocessing import popen_forkserver, popen_spawn_posix, process, reduction, resource_tracker, spawn, util
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from penstock.core.interpreter import arguments_of
from penstock.loader.workers.spawn.template_main import MOST_FDS

_STATUS = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed:", "Mems")
"""How lines of /proc/self/status begin that tell what a new process inherits."""


class SpawnProcess(multiprocessing.context.SpawnProcess):
    """A process that is forked from the template; in the worker it is multiprocessing's own class."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  multiprocessing's name
        if not failures:
            try:
                return _Popen(process_obj, _matching_template())
            except _TemplateEndedError:
                failures.append(os.getpid())
            except _TooManyDescriptorsError:  # spawned processes inherit any number
                pass
        return popen_spawn_posix.Popen(process_obj)

    def __reduce__(self) -> Any:
        return object.__new__, (multiprocessing.context.SpawnProcess,), self.__dict__


def can_fork_spawned(context: BaseContext) -> bool:
    """Return whether workers of this context may come from the template: those of Python's own spawn, on Linux."""
    return sys.platform == "linux" and type(context) is multiprocessing.context.SpawnContext


def warm_up(context: BaseContext) -> None:
    """Start the template in the background, where workers of this context may be started."""
    current: Any = process.current_process()
    is_importing_main = getattr(current, "_inheriting", False)
    if can_fork_spawned(context) and not is_importing_main and not current.daemon:
        with contextlib.suppress(OSError):  # what the system lacks is told when workers are started
            _matching_template()


def inherited_state() -> tuple[Any, ...]:
    """Return what a process that is started now inherits from this one."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    streams = [os.fstat(fd) if _is_open(fd) else None for fd in (1, 2)]
    return (
        dict(os.environb),
        spawn.get_preparation_data("")["sys_path"],
        [spawn.get_executable(), *util._args_from_interpreter_flags()],  # type: ignore[attr-defined]
        os.getcwd(),
        [line for line in status if line.startswith(_STATUS)],
        [Path(f"/proc/self/{name}").read_text() for name in ("limits", "cgroup", "oom_score_adj")],
        (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.getsid(0), os.getpgrp()),
        [(stream.st_dev, stream.st_ino) if stream is not None else None for stream in streams],
    )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class _TemplateEndedError(Exception):
    """The template has ended, and cannot fork a worker."""


class _TooManyDescriptorsError(Exception):
    """A worker needs more descriptors than one message can carry."""


class Template:
    """A running template, and this process's end of the socket to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.state = inherited_state()
        self._lock = threading.Lock()
        self._has_forked = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        executable, *flags = self.state[2]
        command = (
            "import signal; handler = signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C reaches the whole group
            "import penstock.loader.workers.spawn.preload; "
            f"from penstock.loader.workers.spawn.template_main import serve; serve({theirs.fileno()}, handler)"
        )
        with theirs:
            arguments = [executable, *flags, *arguments_of(command, path=self.state[1])]
            self.pid: int = util.spawnv_passfds(executable, arguments, [theirs.fileno()])

    def fork(self, fds: list[int]) -> int:
        """Have the template fork a worker that gets `fds`; return its pid."""
        if len(fds) > MOST_FDS:
            raise _TooManyDescriptorsError
        with self._lock:
            try:
                self._has_forked = True
                socket.send_fds(self.socket, [b"F"], fds)
                answer = self.socket.recv(8)
            except BaseException as error:  # Ctrl-C too: the next answer would be this one's
                self.leave()
                if isinstance(error, ConnectionError):
                    raise _TemplateEndedError from error
                raise
        if not answer:
            self.leave()
            raise _TemplateEndedError
        return int.from_bytes(answer, "little")

    def leave(self) -> None:
        """Let the template end; it does so after its last worker."""
        templates.remove(self)
        self.socket.close()
        _leaving.append(self.pid)
        reap()
        if not self._has_forked and self.pid in _leaving:  # it is busy importing, for nobody
            os.kill(self.pid, signal.SIGKILL)


templates: list[Template] = []
"""The template of this process: one, or none. (And what a fork has inherited, until it wants one.)"""

_leaving: list[int] = []
"""Templates that have been left, and were not seen to end."""

failures: list[int] = []
"""The process in which a template has failed; after that, none is tried again."""


def leave() -> None:
    """Let the template of this process end, if there is one."""
    for template in [*templates]:
        if template.owner == os.getpid():
            template.leave()


atexit.register(leave)


def reap() -> bool:
    """Collect the exit codes of templates that have been left and have ended; return whether all have."""
    for pid in [*_leaving]:
        with contextlib.suppress(ChildProcessError):  # the program has waited for all its children
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                continue
        _leaving.remove(pid)
    return not _leaving


def _matching_template() -> Template:
    for template in [*templates]:
        if template.owner != os.getpid():  # this process was forked
            templates.remove(template)
            template.socket.close()
            _leaving.clear()
        elif template.state != inherited_state():
            template.leave()
    reap()
    if not templates:
        templates.append(Template())
    return templates[0]


class _Popen(popen_forkserver.Popen):
    """multiprocessing's view of a worker that a template has forked. The exit code comes by the sentinel, a pipe."""

    method = "spawn"

    _fds: list[int]
    """What the pickled process refers to by position."""

    def __init__(self, process_obj: Any, template: Template) -> None:
        self._template = template
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        message = io.BytesIO()
        multiprocessing.context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), message)
            reduction.dump(process_obj, message)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        (self.sentinel, status), (data, ours) = os.pipe(), os.pipe()
        # The worker reads end of file there when this process has gone.
        self.finalizer = util.Finalize(self, util.close_fds, (ours, self.sentinel))  # type: ignore[attr-defined]
        try:
            streams = [fd if _is_open(fd) else data for fd in (1, 2)]
            descriptors: list[Any] = [data, status, resource_tracker.getfd(), *streams, *self._fds]
            self.pid = self._template.fork(descriptors)
        except BaseException:
            self.finalizer()
            raise
        finally:
            os.close(data)
            os.close(status)
        with open(ours, "wb", closefd=False) as worker:
            worker.write(message.getbuffer())
