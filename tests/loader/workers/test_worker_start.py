"""How workers start: Ctrl-C while they are forked, worker_init_fn, and what cannot travel to them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from sample_sets import Gate, Opened, Stream
from torch.utils.data import get_worker_info

from penstock import DataLoader, UnpicklableError
from penstock.loader.workers.process_pool import ProcessPool

_ARMED: set[str] = set()
"""The points of a fork at which a SIGINT comes."""


def _interrupt_if_armed(point: str) -> None:
    if point in _ARMED:
        _ARMED.discard(point)
        signal.raise_signal(signal.SIGINT)  # Python runs the handler here, in the hook


os.register_at_fork(
    before=lambda: _interrupt_if_armed("before"),
    after_in_parent=lambda: _interrupt_if_armed("after, in the parent"),
    after_in_child=lambda: _interrupt_if_armed("after, in the child"),
)


ROWS = [(number, float(number)) for number in range(8)]


@pytest.mark.parametrize("point", ["before", "after, in the parent"])
@pytest.mark.slow
def test_an_interrupt_during_a_fork_reaches_the_program(point: str) -> None:
    loader = DataLoader(ROWS, 2, num_workers=2, multiprocessing_context="fork")
    _ARMED.add(point)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert not _ARMED
    assert len([*loader]) == 4


@pytest.mark.slow
def test_an_interrupt_does_not_end_a_worker_that_is_being_forked() -> None:
    loader = DataLoader(ROWS, 2, num_workers=2, multiprocessing_context="fork")
    _ARMED.add("after, in the child")
    try:
        assert len([*loader]) == 4
    finally:
        _ARMED.clear()
    assert loader.statistics().restarts == 0


@pytest.mark.slow
def test_an_interrupt_while_an_abandoned_loop_is_cleaned_up_reaches_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = ProcessPool.close
    closed = []

    def interrupted_close(pool: ProcessPool) -> None:
        signal.raise_signal(signal.SIGINT)
        close(pool)
        closed.append(pool)

    monkeypatch.setattr(ProcessPool, "close", interrupted_close)
    running = [iter(DataLoader(ROWS, 2, num_workers=1, multiprocessing_context="fork"))]
    next(running[0])

    def abandon() -> None:
        running.clear()  # a finalizer closes the pool, and Python drops what is raised there
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        abandon()
    assert closed


@pytest.mark.slow
def test_an_interrupt_while_workers_are_put_away_after_an_epoch_reaches_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = multiprocessing.util.close_fds

    def interrupted_close(*fds: int) -> None:
        monkeypatch.undo()
        close(*fds)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("multiprocessing.util.close_fds", interrupted_close)

    def load() -> None:
        for _ in DataLoader(ROWS, 2, num_workers=2, multiprocessing_context="fork"):
            pass
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        load()


# ── worker_init_fn ──────────────────────────────────────────────────────────────────────────────────────────


def refuse(worker: int) -> None:
    raise KeyError(f"no file for worker {worker}")


@pytest.mark.parametrize("dataset", [range(8), Stream(8)], ids=["map-style", "iterable"])
@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_what_worker_init_fn_raises_is_raised_for_every_batch(dataset: Any, worker_type: str) -> None:
    workers = 1 if worker_type == "thread" else 2
    batches = iter(DataLoader(dataset, num_workers=workers, worker_type=worker_type, worker_init_fn=refuse))
    for worker in (0, workers - 1, 0):
        with pytest.raises(KeyError, match=f"(?s)in DataLoader worker {worker_type} {worker}.*no file for worker"):
            next(batches)


def test_worker_init_fn_is_called_once_in_each_thread() -> None:
    called: list[tuple[int, str, int, int, bool]] = []
    data = torch.arange(8)

    def init(worker: int) -> None:
        info = get_worker_info()
        called.append((worker, threading.current_thread().name, info.id, info.num_workers, info.dataset is data))
        torch.manual_seed(5)

    loader = DataLoader(data, 2, num_workers=2, worker_type="thread", worker_init_fn=init)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    batches = iter(loader)
    after = torch.get_rng_state()
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert called == [(k, f"penstock-worker-{k}", k, 2, True) for k in range(2)]
    torch.set_rng_state(before)
    torch.empty((), dtype=torch.int64).random_()  # the seed that torch's iterators draw
    assert torch.equal(torch.get_rng_state(), after)
    assert get_worker_info() is None


@pytest.mark.slow
@pytest.mark.parametrize(("method", "gate"), [("spawn", nullcontext), ("forkserver", nullcontext), ("spawn", Gate)])
def test_what_a_dataset_shares_with_its_methods_and_with_the_program_stays_shared_in_a_new_interpreter(
    method: str, gate: Callable[[], Any]
) -> None:
    data = Opened(gate())
    loader = DataLoader(
        data,
        4,
        num_workers=2,
        worker_init_fn=data.open,
        collate_fn=data.collate,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    for scale in (1.0, 3.0):
        data.scale.fill_(scale)
        assert [*loader] == [(k, [(k, scale * index) for index in range(4 * k, 4 * k + 4)]) for k in range(2)]
    assert data.reads.tolist() == [2] * 8


# ── refused before a worker starts ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["worker_init_fn", "collate_fn", "errors", "dataset"])
def test_what_cannot_be_pickled_is_named_and_leaves_nothing_open(name: str) -> None:
    arguments: dict[str, Any] = {"dataset": range(4), name: Local() if name == "dataset" else lambda *_: 0}
    loader = DataLoader(**arguments, num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(UnpicklableError, match=f"the {name} .*'spawn' needs.*multiprocessing_context='fork'"):
        iter(loader)


def Local() -> Any:  # noqa: N802
    class Dataset:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    return Dataset()


def test_prefetching_nothing_is_refused_instead_of_waiting_for_ever() -> None:
    loader = DataLoader(range(4), num_workers=1, prefetch_factor=0)
    with pytest.raises(AssertionError, match="prefetch_factor must be greater than 0"):
        iter(loader)


def test_a_live_iterator_cannot_be_pickled_as_in_torch() -> None:
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iter(DataLoader(range(4))))


def test_what_a_program_has_its_fork_server_import_stays_on_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", ["__main__", "colorsys"])
    pool = ProcessPool.__new__(ProcessPool)
    pool._context = multiprocessing.get_context("forkserver")
    for _ in range(2):
        pool._preload()
        names = forkserver._forkserver._preload_modules
        assert names[:2] == ["__main__", "colorsys"]
        assert names.count("penstock.loader.workers.preload") == 1
