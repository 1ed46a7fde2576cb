"""Python processes that start with torch imported: forked from one process per test session that has it.

A test that starts `[sys.executable, ...]` pays 2.5 s of CPU for `import torch`, and there are hundreds of them. With
the fixture `preloaded_python` (in tests/conftest.py), `subprocess.Popen` and multiprocessing's "spawn", in the test
and in the processes that it starts, ask a server for such a process: the server forks, the fork takes over the standard
streams, the environment, the working directory and the command line, and runs the program as `__main__`.

What differs from a process of its own: torch (with its compiler, which the first optimizer imports, and FSDP) and
penstock are imported already, so nothing that happens on their import can be tested this way; and the process is a
grandchild of whoever asked for it. Commands that are not `python script`, `python -c` or `python -m`, and unusual
arguments of `Popen`, start a real process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import popen_fork, popen_spawn_posix
from pathlib import Path
from typing import Any, NoReturn

SERVER = "PENSTOCK_TESTS_PYTHON_SERVER"
"""The environment variable with the path of the server's socket."""

TOGETHER = "PENSTOCK_TESTS_END_TOGETHER"
"""The environment variable for processes that are killed when whoever asked for them ends, as on a lost machine."""

_LENGTH = struct.Struct("!I")
_MAX_FDS = 64
REAL_POPEN = subprocess.Popen


class PreloadedPopen(REAL_POPEN):
    """A `subprocess.Popen` whose Python processes come from the server."""

    _server: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: bool, *rest: Any) -> None:  # fmt: skip
        pipes, (_, gid, gids, uid, umask, new_session, group) = rest[:6], rest[6:]
        environment = os.environ if env is None else env
        command = _program(args, cwd or ".") if executable is None and not shell else None
        unusual = preexec_fn is not None or not close_fds or (gid, gids, uid, umask) != (None, None, None, -1)
        server = environment.get(SERVER) or os.environ.get(SERVER)
        if command is None or unusual or server is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                                   creationflags, shell, *rest)  # fmt: skip
            return
        standard = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "command": command,
            "cwd": os.path.abspath(cwd or os.getcwd()),
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()} | {SERVER: server},
            "descriptors": [0, 1, 2, *pass_fds],
            "new_session": new_session,
            "group": group,
            "ends_with_asker": TOGETHER in environment,
        }
        body = json.dumps(request).encode()
        try:
            if not os.path.isdir(request["cwd"]):
                raise FileNotFoundError(request["cwd"])
            self._server = socket.socket(socket.AF_UNIX)
            self._server.connect(server)
            socket.send_fds(self._server, [_LENGTH.pack(len(body))], [*standard, *pass_fds])
            self._server.sendall(body)
            (self.pid,) = struct.unpack("!i", _read(self._server, 4))
            self._child_created = True
        except BaseException:  # a signal's handler may raise while the answer is awaited, as the doctor's alarm does
            if self._server is not None:
                self._server.close()
            raise
        finally:
            self._close_pipe_fds(*pipes)

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._server is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self._take_status()
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self._server is None:
            return super()._wait(timeout)
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take_status()
        return self.returncode

    def _take_status(self) -> None:
        assert self._server is not None
        (status,) = struct.unpack("!i", _read(self._server, 4))
        self.returncode = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            self._server.send(b"r")  # reap it: as with a process of one's own, its number is taken until now
        self._server.close()


def install(patch: Callable[[Any, str, Any], None]) -> None:
    """Have `patch` (setattr, or a monkeypatch's) make subprocess and multiprocessing's "spawn" ask the server."""
    patch(subprocess, "Popen", PreloadedPopen)
    patch(multiprocessing.util, "spawnv_passfds", _spawn)
    patch(popen_spawn_posix.Popen, "poll", _poll)


_spawned: dict[int, PreloadedPopen] = {}
_real_spawn = multiprocessing.util.spawnv_passfds


def _spawn(path: Any, args: Any, descriptors: Any) -> int:
    words = [os.fsdecode(word) for word in args]
    if "--multiprocessing-fork" not in words:
        return _real_spawn(path, args, descriptors)
    process = PreloadedPopen([sys.executable, *words[words.index("-c") :]], pass_fds=descriptors)
    _spawned[process.pid] = process
    return process.pid


def _poll(popen: popen_spawn_posix.Popen, flag: int = os.WNOHANG) -> int | None:
    process = _spawned.get(popen.pid)
    if process is None:
        return popen_fork.Popen.poll(popen, flag)
    popen.returncode = process.poll() if flag & os.WNOHANG else process.wait()
    if popen.returncode is not None:
        del _spawned[popen.pid]
    return popen.returncode


def _program(args: Any, cwd: Any) -> list[str] | None:
    """Return what comes after `python`, if the server can run it."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [os.fsdecode(word) for word in args]
    if words[1:2] == ["-u"]:  # torchrun's; what is written is written when the process ends
        del words[1]
    if len(words) < 2 or words[0] != sys.executable:
        return None
    if words[1].startswith("-"):
        return words[1:] if words[1] in ("-c", "-m") and len(words) > 2 else None
    return words[1:] if words[1].endswith(".py") and os.path.isfile(os.path.join(cwd, words[1])) else None


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the server of Python processes has ended")
        data += piece
    return data


@contextlib.contextmanager
def serving(started: set[int], *modules: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """Yield the path of a new server's socket; its process number is in `started` meanwhile.

    Args:
        started: the ids of processes that belong to no single test.
        modules: what it imports besides torch and penstock.
        environment: its environment variables, where they matter to the modules.
    """
    with tempfile.TemporaryDirectory(prefix="python-") as folder:
        path = str(Path(folder, "socket"))
        command = [sys.executable, __file__, path, *modules]
        server = REAL_POPEN(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        started.add(server.pid)
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield path
        finally:
            server.stdin.close()
            server.stdout.close()
            server.terminate()  # its end of input may be held open by a process that some test has leaked
            server.wait()
            started.discard(server.pid)


# ── the server ──────────────────────────────────────────────────────────────────────────────────────────────


def _serve(path: str, *modules: str) -> Callable[[], None] | None:
    """Fork for every request until standard input ends. In a fork, return the program that it is to run."""
    install(setattr)
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.utils.data  # noqa: F401

    import penstock.loader.dataloader  # noqa: F401

    for module in modules:
        importlib.import_module(module)
    base = [entry for entry in sys.path[1:] if entry not in _python_path(os.environ)]
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that holds an object
    children, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    os.write(1, b"ready\n")
    while True:
        readable, _, _ = select.select([listener, 0, children, *_asked], [], [])
        if 0 in readable:
            listener.close()
            return None
        if children in readable:
            os.read(children, 4096)
            _report()
        for connection in set(readable) & set(_asked):
            _leave(connection)
        if listener not in readable:
            continue
        asker, _ = listener.accept()
        head, descriptors, _, _ = socket.recv_fds(asker, _LENGTH.size, _MAX_FDS)
        request = json.loads(_read(asker, *_LENGTH.unpack(head)))
        connection = asker.detach()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            listener.detach()
            return _become(request, connection, descriptors, base)
        _asked[connection] = _Asked(pid, request["ends_with_asker"])
        for descriptor in descriptors:
            os.close(descriptor)


@dataclass
class _Asked:
    """A process that was asked for, until whoever asked knows of its end, or is gone."""

    pid: int
    ends_with_asker: bool
    has_ended: bool = False


_asked: dict[int, _Asked] = {}
"""By their connections."""

_orphans: set[int] = set()
"""The processes that nobody asks about any more."""


def _leave(connection: int) -> None:
    """Reap a process of whose end its asker knows; without an asker, when it ends."""
    one = _asked.pop(connection)
    os.close(connection)
    if one.ends_with_asker and not one.has_ended:
        os.kill(one.pid, signal.SIGKILL)
    _orphans.add(one.pid)
    _reap_orphans()


def _report() -> None:
    """Tell of processes that have ended. They are not reaped: their askers may send them, or their groups, signals."""
    for connection, one in _asked.items():
        if one.has_ended:
            continue
        ended = os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            one.has_ended = True
            status = ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status
            with contextlib.suppress(OSError):
                os.write(connection, struct.pack("!i", status))
    _reap_orphans()


def _reap_orphans() -> None:
    _orphans.difference_update([pid for pid in _orphans if os.waitpid(pid, os.WNOHANG)[0]])


def _become(request: dict[str, Any], connection: int, descriptors: list[int], base: list[str]) -> Callable[[], None]:
    """Take over what a new process has from whoever starts it, and return its program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, 1000)
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 1000) for number in descriptors]
    os.closerange(0, connection)
    for number, target in zip(high, request["descriptors"], strict=True):
        os.dup2(number, target, inheritable=True)
        os.close(number)
    if request["new_session"]:
        os.setsid()
    if request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    with contextlib.suppress(OSError):  # whoever asked may have ended
        os.write(connection, struct.pack("!i", os.getpid()))  # now that it leads the session that it is to lead
    os.close(connection)
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, "strict")
    sys.stderr = sys.__stderr__ = _writer(2, "backslashreplace")
    tempfile.tempdir = None
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    return _as_main(request["command"], [*_python_path(os.environ), *base])


def _as_main(command: list[str], path: list[str]) -> Callable[[], None]:
    sys.orig_argv = [sys.executable, *command]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if command[0] == "-m":
        sys.path[:] = [os.getcwd(), *path]
        sys.argv = command[1:]
        return lambda: runpy._run_module_as_main(command[1])
    if command[0] == "-c":
        sys.path[:] = ["", *path]
        sys.argv = ["-c", *command[2:]]
        return lambda: exec(compile(command[1], "<string>", "exec"), main.__dict__)
    sys.path[:] = [os.path.dirname(os.path.abspath(command[0])), *path]
    sys.argv = command
    main.__file__ = os.path.abspath(command[0])
    return lambda: exec(compile(Path(main.__file__).read_bytes(), main.__file__, "exec"), main.__dict__)


def _writer(number: int, errors: str) -> io.TextIOWrapper:
    line_buffering = number == 2 or os.isatty(number)
    raw = io.FileIO(number, "w", closefd=False)
    raw.name = f"<{'stdout' if number == 1 else 'stderr'}>"
    return io.TextIOWrapper(
        io.BufferedWriter(raw), "utf-8", errors, line_buffering=line_buffering, write_through=number == 2
    )


def _python_path(environment: Any) -> list[str]:
    return [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(program: Callable[[], None]) -> NoReturn:
    """Run a program and end as the interpreter does, but for tearing down the modules, which takes a second."""
    code = 0
    try:
        program()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if code and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    with contextlib.suppress(BaseException):
        threading._shutdown()
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    program = _serve(*sys.argv[1:])
    if program is not None:
        _run(program)
