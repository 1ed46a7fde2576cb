"""Who has drawn: each of the generators, and only those."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.core.random_states import OF_SAMPLES, draw_once, marks, names_of_drawn, note_sample_draw


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "torch's"),
        (random.random, "Python's (random)"),
        (np.random.rand, "NumPy's (numpy.random)"),
        (lambda: np.random.seed(3), "NumPy's (numpy.random)"),
        (note_sample_draw, OF_SAMPLES),
    ],
)
def test_a_draw_is_seen_by_the_name_of_its_generator(draw: Callable[[], object], name: str) -> None:
    since = marks()
    assert names_of_drawn(since) == []
    draw()
    assert names_of_drawn(since) == [name]


def test_numpys_generator_may_be_of_another_kind() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        since = marks()
        assert names_of_drawn(since) == []
        np.random.rand()
        assert names_of_drawn(since) == ["NumPy's (numpy.random)"]
    finally:
        np.random.set_bit_generator(before)


def test_the_samples_of_another_thread_are_not_this_ones() -> None:
    since = marks()
    thread = threading.Thread(target=note_sample_draw)
    thread.start()
    thread.join()
    assert names_of_drawn(since) == []


def test_one_draw_of_each_is_seen() -> None:
    since = marks()
    draw_once()
    assert len(names_of_drawn(since)) == 3
