"""The random states of this process that samples commonly draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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
