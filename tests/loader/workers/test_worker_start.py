"""How workers start: Ctrl-C while they are forked, worker_init_fn, and what cannot travel to them."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from penstock import DataLoader
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


@pytest.mark.parametrize("point", ["before", "after, in the parent"])
def test_an_interrupt_during_a_fork_reaches_the_program(point: str) -> None:
    loader = DataLoader(torch.arange(8), 2, num_workers=2, multiprocessing_context="fork")
    _ARMED.add(point)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert not _ARMED
    assert len([*loader]) == 4


def test_an_interrupt_does_not_end_a_worker_that_is_being_forked() -> None:
    loader = DataLoader(torch.arange(8), 2, num_workers=2, multiprocessing_context="fork")
    _ARMED.add("after, in the child")
    try:
        assert len([*loader]) == 4
    finally:
        _ARMED.clear()
    assert loader.statistics().restarts == 0


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
    batches = iter(DataLoader(torch.arange(8), 2, num_workers=1, multiprocessing_context="fork"))
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        del batches  # in a finalizer, where Python drops what is raised
        threading.Event().wait(60)
    assert closed
