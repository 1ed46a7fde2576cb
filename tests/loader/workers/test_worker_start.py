"""How workers start: Ctrl-C while they are forked, worker_init_fn, and what cannot travel to them."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from penstock import DataLoader

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
