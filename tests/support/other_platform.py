"""A program as on Windows or macOS: what their Python does not have is absent, for penstock only.

    python other_platform.py windows|macos

torch and the standard library keep everything, because theirs knows the system that it runs on. The program is tested
by `tests/loader/test_other_platforms.py`.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import sys
from types import ModuleType
from typing import Any

MACOS = {
    "os": "memfd_create MFD_CLOEXEC O_TMPFILE sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise "
    "POSIX_FADV_RANDOM pidfd_open O_DIRECT eventfd",
    "socket": "MSG_CMSG_CLOEXEC MSG_NOSIGNAL",
    "mmap": "MADV_HUGEPAGE",
    "resource": "prlimit",
}
WINDOWS = {
    "os": f"{MACOS['os']} register_at_fork fork forkpty sysconf getuid geteuid getpgid setsid killpg pread preadv "
    "pwrite O_CLOEXEC O_NONBLOCK statvfs uname fchmod fchown wait WNOHANG set_blocking nice",
    "socket": f"{MACOS['socket']} AF_UNIX SOCK_SEQPACKET SCM_RIGHTS CMSG_SPACE MSG_DONTWAIT",
    "mmap": f"{MACOS['mmap']} MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS PROT_READ PROT_WRITE",
    "signal": "SIGHUP SIGKILL SIGSTOP SIGCONT SIGALRM SIGQUIT SIGPIPE SIGUSR1 pthread_kill pthread_sigmask setitimer",
    "select": "poll epoll",
    "time": "clock_gettime CLOCK_MONOTONIC",
    "multiprocessing.reduction": "DupFd sendfds recvfds",
}
NO_MODULE = {"windows": {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"}, "macos": set[str]()}


class Without(ModuleType):
    """A module without some of its names."""

    def __init__(self, whole: ModuleType, absent: str) -> None:
        super().__init__(whole.__name__)
        self.__dict__["_whole"], self.__dict__["_absent"] = whole, {*absent.split()}

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this platform")
        return getattr(self._whole, name)


def take_away(platform: str) -> None:
    """Have every module of penstock see the modules of `platform`, and no /proc."""
    absent = WINDOWS if platform == "windows" else MACOS
    parts = {name: Without(importlib.import_module(name), names) for name, names in absent.items()}
    whole_import, whole_open = builtins.__import__, io.open

    def import_there(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = whole_import(name, globals_, locals_, fromlist, level)
        if level == 0 and str((globals_ or {}).get("__name__", "")).startswith("penstock"):
            if name in NO_MODULE[platform]:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in parts and (fromlist or "." not in name):
                return parts[name]
        return module

    def open_there(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return whole_open(file, *arguments, **options)

    for name in [name for name in sys.modules if name.partition(".")[0] == "penstock"]:
        del sys.modules[name]  # imported already where tests preload it
    builtins.__import__ = import_there
    io.open = builtins.open = open_there


if __name__ in ("__main__", "__mp_main__"):  # in its worker process, too
    import torch.utils.data

    take_away(sys.argv[1])

import penstock  # noqa: E402
from penstock import DataLoader  # noqa: E402


def refusal(**arguments: Any) -> str:
    """Return what a loader with worker processes says to these arguments."""
    try:
        loader = DataLoader(range(8), 4, num_workers=1, **arguments)
        iter(loader)
    except penstock.OptionError as error:
        return str(error)
    return "not refused"


def main() -> None:
    """Load in every way that there is, and print what came."""
    from penstock import cli

    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    found: dict[str, Any] = {}
    for name, options in {
        "inline": {},
        "large": {"collate_fn": lambda samples: torch.full((1 << 20,), samples[0][0])},
        "threads": {"num_workers": 2, "worker_type": "thread"},
    }.items():
        loader = DataLoader(data, 4, seed=1, **options)
        batches = [torch.as_tensor(batch[0] if isinstance(batch, list) else batch[:4]) for batch in loader]
        found[name] = [batch.tolist() for batch in batches]
        loader.state_dict()
    loader = DataLoader(data, 4, num_workers=1, multiprocessing_context="spawn", pin_memory="auto")
    batches = iter(loader)
    found["iterator"] = type(batches).__module__
    found["workers"] = [batch[0].tolist() for batch in batches]
    found["reason"] = loader.statistics().fallback_reason
    found["refused"] = {
        name: refusal(**{name: value})
        for name, value in {"seed": 3, "errors": "skip", "device": "sim", "keep_batch_size": True}.items()
    }
    try:
        loader.state_dict()
    except penstock.StateError as error:
        found["state"] = str(error)
    try:
        cli.main(["--help"])
    except SystemExit as end:
        found["help"] = end.code
    print(json.dumps(found))


if __name__ == "__main__":
    main()
