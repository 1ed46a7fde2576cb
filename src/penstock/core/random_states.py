"""The random states of this process that samples commonly draw from: torch's, Python's and NumPy's; who draws."""

from __future__ import annotations

import ctypes
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MT19937_NBYTES = 625 * 4
"""624 words of 32 bits, and the position."""


OF_SAMPLES = "penstock.sample_rng's"
"""What `names_of_drawn` calls the generators of samples."""


class _ThreadCounts(threading.local):
    of_samples = 0


_counts = _ThreadCounts()


def note_sample_draw() -> None:
    """Count that this thread has drawn from a generator that belongs to a sample; see `names_of_drawn`."""
    _counts.of_samples += 1


def draw_once() -> None:
    """Draw a number from each of the three generators."""
    torch.empty((), dtype=torch.int64).random_()
    random.random()
    np.random.random()


def marks() -> Any:
    """Return what `names_of_drawn` compares with later: copies of the states, and this thread's count."""
    return torch.get_rng_state(), random.getstate(), _numpys_bytes(), _counts.of_samples


def names_of_drawn(since: Any) -> list[str]:
    """Return the generators that were drawn from, or seeded, since `marks`: by any thread, but for those of samples.

    >>> since = marks()
    >>> _ = random.random()
    >>> names_of_drawn(since), names_of_drawn(marks())
    (["Python's (random)"], [])
    """
    torchs, pythons, numpys, of_samples = since
    changed = {
        "torch's": not torch.equal(torchs, torch.get_rng_state()),
        "Python's (random)": pythons != random.getstate(),
        "NumPy's (numpy.random)": numpys != _numpys_bytes(),
        OF_SAMPLES: of_samples != _counts.of_samples,
    }
    return [name for name, has_changed in changed.items() if has_changed]


def _numpys_bytes() -> bytes:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is np.random.MT19937:  # its memory: `state` would take 60 µs to make
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_NBYTES)
    return pickle.dumps(generator.state)


def get_states() -> Any:
    """Return the three states as they are now."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_states(states: Any) -> None:
    """Restore what `get_states` returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@contextmanager
def keep_states() -> Iterator[None]:
    """Restore the three states at the end."""
    states = get_states()
    try:
        yield
    finally:
        set_states(states)
