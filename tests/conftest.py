"""Leave the machine as it was found: a test that leaks a process, a thread, a descriptor or a segment fails."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import effort
import preloaded
import pytest
from _pytest.doctest import DoctestModule
from machines import HOLDERS
from quick import Stops

GRACE_S = 30.0
"""How long what a test has closed may take to be gone: processes and threads end on their own time."""

_SHM = Path("/dev/shm")

_STOPS = pytest.StashKey[Stops]()

_SERVERS: set[int] = set()
"""The process that `preloaded_python` asks for others: it stays, what it started must not."""


_FRAMEWORKS = (
    *("scipy.signal", "scipy.stats", "huggingface_hub", "boto3", "jinja2", "PIL.Image"),
    *("transformers.utils", "transformers.tokenization_utils_base", "transformers.image_utils"),
)


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


@pytest.fixture(autouse=True, scope="session")
def _arrow_has_its_pipe() -> None:
    """Make the pipe for signals that pyarrow keeps from its first read of CSV on."""
    with contextlib.suppress(ImportError):
        import pyarrow.csv

        pyarrow.csv.read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if _STOPS in request.config.stash:  # a test that is stopped half-way leaves things behind, which later ones find
        yield
        return
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
    worker = sys.modules.get("torch.utils.data._utils.worker")
    if worker is not None and worker._worker_info is not None:
        left.append(f"what get_worker_info() returns: {worker._worker_info}")
        worker._worker_info = None
    if left:
        pytest.fail("this test leaked\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def _python_server() -> Iterator[str]:
    with preloaded.serving(_SERVERS) as path:
        yield path


@pytest.fixture(scope="module")
def preloaded_python(_python_server: str) -> Iterator[None]:
    """Start the Python processes of this module's tests, and theirs, with torch imported (see support/preloaded.py)."""
    with _asking(_python_server):
        yield


@pytest.fixture(scope="module")
def preloaded_frameworks() -> Iterator[None]:
    """The same, with what Lightning and Transformers import that knows nothing of torch's DataLoader."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with preloaded.serving(_SERVERS, *_FRAMEWORKS, environment=environment) as server, _asking(server):
        yield


@contextlib.contextmanager
def _asking(server: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        preloaded.install(patch.setattr)
        patch.setenv(preloaded.SERVER, server)
        yield


@pytest.fixture
def fresh_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start real Python processes, where a module has `preloaded_python`: for what happens when torch is imported."""
    monkeypatch.setattr(subprocess, "Popen", preloaded.REAL_POPEN)


@pytest.fixture(autouse=True, scope="module")
def _collect_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every failure survived collects garbage, thousands of times in some tests: let it look at what they make only."""
    if "memory" not in request.path.relative_to(Path(__file__).parent).parts:
        yield
        return

    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # torch imports its compiler for the first optimizer
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make quick` asks for."""
    parser.addoption("--quick", action="store_true", help="skip each test where it starts a process or opens a port")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how thorough to be, and let tests interrupt their children, also under `nohup`."""
    effort.load_profile()
    _preload_torch_in_fork_servers()
    if config.getoption("quick"):
        config.stash[_STOPS] = Stops()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _preload_torch_in_fork_servers() -> None:
    """Have multiprocessing's server import torch once: a worker that it forks would spend 2.5 s of CPU on that."""
    preload = multiprocessing.forkserver.set_forkserver_preload
    multiprocessing.forkserver.set_forkserver_preload = lambda names: preload([*names, "torch.utils.data"])
    multiprocessing.forkserver.set_forkserver_preload(["__main__"])


@pytest.fixture(autouse=True, scope="session")
def _quick(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if _STOPS in request.config.stash:
            request.config.stash[_STOPS].install(patch)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in the documentation of tests: only that of src has any, and each process would look."""
    found = yield
    return [one for one in found if not isinstance(one, DoctestModule)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that take longest, so that none is left at the end; skip what needs a GPU."""
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None, item.get_closest_marker("long") is None))
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
    helpers = {
        multiprocessing.resource_tracker._resource_tracker._pid,
        multiprocessing.forkserver._forkserver._forkserver_pid,
    }
    found, parents = [], [os.getpid()]
    while parents:
        for pid in _children(parents.pop()):
            if pid in HOLDERS:
                continue
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
            parents.append(pid)
            if pid not in helpers | _SERVERS and not _is_resource_tracker(pid):
                found.append(f"{name} (pid {pid})")
    return found


def _children(parent: int) -> list[int]:
    # The kernel's own lists: to look at all processes of the machine, twice for each test, would take a minute in all.
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{parent}/task")
    except OSError:  # it has ended since it was found
        return found
    for task in tasks:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
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
    # What torch and multiprocessing name theirs; penstock's own have no name. Any other file is another program's.
    return [path.name for path in _SHM.iterdir() if path.name.startswith(("torch_", "psm_"))] if _SHM.is_dir() else []


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
