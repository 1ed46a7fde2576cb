"""Leave the machine as it was found: a test that leaks a process, a thread, a descriptor or a segment fails."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from machines import HOLDERS

GRACE_S = 5.0
"""How long what a test has closed may take to be gone: processes and threads end on their own time."""

_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Belongings:
    """What this process holds at one moment, each thing with a name that a person can use."""

    processes: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        multiprocessing.active_children()  # reaps those that have ended
        return cls(
            processes=frozenset(_descendants()),
            threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
            descriptors=frozenset(_descriptors()),
            segments=frozenset(_segments()),
        )

    def beyond(self, before: Belongings) -> list[str]:
        """Return a line for everything that is here and was not there before."""
        kinds = ("processes", "threads", "descriptors", "segments")
        return [f"{kind}: {name}" for kind in kinds for name in sorted(getattr(self, kind) - getattr(before, kind))]


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = Belongings.now()
    yield
    left = Belongings.now().beyond(before)
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        still = Belongings.now().beyond(before)
        left = [line for line in left if line in still]  # what comes and goes meanwhile is another program's
    foreign = _mapped_by_others() if any(line.startswith("segments") for line in left) else set()
    left = [line for line in left if line.removeprefix("segments: ") not in foreign]
    if left:
        pytest.fail("this test leaked\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def _collect_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every failure survived collects garbage, thousands of times in some tests: let it look at what they make only."""
    if request.path.parent.name != "memory":
        yield
        return

    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # torch imports its compiler for the first optimizer
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_configure() -> None:
    """Let tests interrupt their children, also where this process was started with signals ignored (by `nohup`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    wanting = [item for item in items if item.get_closest_marker("cuda")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


# ── what there is ───────────────────────────────────────────────────────────────────────────────────────────


def _descendants() -> list[str]:
    """Return the processes that came from this one, without multiprocessing's two long-lived helpers."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = entry.joinpath("stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        children.setdefault(int(rest.split()[1]), []).append((int(entry.name), name))
    helpers = {
        multiprocessing.resource_tracker._resource_tracker._pid,
        multiprocessing.forkserver._forkserver._forkserver_pid,
    }
    found, parents = [], [os.getpid()]
    while parents:
        for pid, name in children.get(parents.pop(), []):
            if pid in HOLDERS:
                continue
            parents.append(pid)
            if pid not in helpers and not _is_resource_tracker(pid):
                found.append(f"{name} (pid {pid})")
    return found


def _is_resource_tracker(pid: int) -> bool:
    """Say whether `pid` is a helper's own resource tracker, which lives as long as the helper."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _descriptors() -> list[str]:
    helpers = {
        multiprocessing.resource_tracker._resource_tracker._fd,
        multiprocessing.forkserver._forkserver._forkserver_alive_fd,
    }
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor of the listing itself
            continue
        if int(number) not in helpers:
            found.append(f"{number} → {target}")
    return found


def _segments() -> list[str]:
    # Named semaphores are torch's loader's and other programs'; penstock makes none.
    return [path.name for path in _SHM.iterdir() if not path.name.startswith("sem.")] if _SHM.is_dir() else []


def _mapped_by_others() -> set[str]:
    """Return the segments that processes which are none of ours have mapped: another program's business."""
    ours = {os.getpid(), *(int(line.rpartition("pid ")[2].rstrip(")")) for line in _descendants())}
    names: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) in ours:
            continue
        try:
            maps = entry.joinpath("maps").read_text()
        except OSError:
            continue
        names.update(line.rpartition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line)
    return names
