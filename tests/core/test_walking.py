"""What other threads change meanwhile is walked through whole, and what a fork leaves behind is begun anew once."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.core.per_process import PerProcess
from penstock.core.walking import walk
from penstock.data.sample_cache import sample_cache, sample_file
from penstock.loader.transport import channel, ring
from penstock.loader.workers import thread_gate


class Growing(set[Any]):
    """Gets another member while it is walked through for the first time."""

    has_grown = False

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            if not self.has_grown:
                self.has_grown = True
                self.add(Called())
            yield one


class Called:
    """Counts who is called at a fork."""

    calls = 0

    def note(self) -> None:
        type(self).calls += 1

    before_fork = after_fork_in_child = close = forget = forget_threads = note


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("owner", "name", "hook"),
    [
        (ring, "_rings", "_before_fork"),
        (ring, "_rings", "_after_fork_in_child"),
        (channel, "_our_ends", "_close_in_child"),
        (sample_file, "_files", "_forget_all"),
        (thread_gate._state, "gates", "_begin_child"),
    ],
)
def test_a_fork_reaches_all_although_another_thread_adds_one(
    owner: Any, name: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, Growing({Called(), Called()}))
    monkeypatch.setattr(Called, "calls", 0)
    monkeypatch.setattr(thread_gate._state, "changed", thread_gate._state.changed)
    getattr(thread_gate if owner is thread_gate._state else owner, hook)()
    assert Called.calls == 3


def test_a_weak_set_that_another_thread_changes_is_walked_through() -> None:
    class Member:
        pass

    members: weakref.WeakSet[Member] = weakref.WeakSet()
    kept, is_over = [Member() for _ in range(50)], threading.Event()
    members.update(kept)

    def change() -> None:
        while not is_over.is_set():
            members.add(Member())

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(300):
            assert set(kept) <= set(walk(members))
    finally:
        is_over.set()
        changing.join()


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((600,), index)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_statistics_are_asked_for_while_the_loop_runs(workers: int) -> None:
    loader = DataLoader(Rows(), 4, num_workers=workers)
    failures: list[Exception] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                loader.statistics()
            except Exception as error:  # noqa: BLE001  whatever it is
                failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    kept = []
    for number, batch in enumerate(loader):
        kept.append(batch)
        if number % 7 == 0:
            kept.clear()
    is_over.set()
    asking.join()
    assert failures == []


def in_child(work: Callable[[], bool]) -> bool:
    """Return what `work` returns in a forked process; False if it takes a minute."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        threading.Timer(60, lambda: os._exit(1)).start()
        os.write(write, b"yes" if work() else b"no")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return found == "yes"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_while_a_handle_is_opened_opens_its_own() -> None:
    is_opening, may_go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def open_it() -> int:
        if os.getpid() == parent:
            is_opening.set()
            assert may_go_on.wait(60)
        return os.getpid()

    handle = PerProcess(open_it)
    opening = threading.Thread(target=handle.get)
    opening.start()
    assert is_opening.wait(60)
    try:
        assert in_child(lambda: handle.get() == os.getpid())
    finally:
        may_go_on.set()
        opening.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_of_a_forked_process_open_an_inherited_handle_once() -> None:
    made: list[int] = []

    def make() -> object:
        made.append(1)
        return object()

    handles = [PerProcess(make) for _ in range(50)]
    for handle in handles:
        handle.get()

    def all_at_once() -> bool:
        made.clear()
        begin = threading.Barrier(4)
        found: list[list[Any]] = []

        def get() -> None:
            begin.wait()
            found.append([handle.get() for handle in handles])

        threads = [threading.Thread(target=get) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(made) == len(handles) and all(one == found[0] for one in found)

    assert in_child(all_at_once)


def test_hits_of_a_sample_cache_that_threads_count_are_all_counted() -> None:
    counts = sample_cache._Counts()

    def count() -> None:
        for _ in range(2000):
            counts.add(sample_cache._HITS)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.totals() == (8000, 0)
