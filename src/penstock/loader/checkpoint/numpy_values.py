"""NumPy's values in a state, as what `torch.load(weights_only=True)` reads, and back.

A dataset's or a sampler's own state may hold NumPy scalars and arrays (a random state, a counter). They come back with
their types: NumPy computes other things with Python's numbers. An array of objects, or with fields, stays as it is.

    {"penstock.numpy": "<i8", "shape": [2], "data": torch.uint8[16]}        an array
    {"penstock.numpy": "<f4", "shape": None, "data": "0000c03f"}            a scalar
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_MARK = "penstock.numpy"

_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.Tensor})
"""What holds no value of NumPy's; states are of these, but for a few."""


def without_numpy(state: Any) -> Any:
    """Return a state without NumPy's values; whatever has none is the same object.

    >>> without_numpy({"at": np.float32(1.5)})
    {'at': {'penstock.numpy': '<f4', 'shape': None, 'data': '0000c03f'}}
    """
    if isinstance(state, np.generic | np.ndarray):
        return state if state.dtype.hasobject or state.dtype.names else _as_plain(state)
    return _over(state, without_numpy)


def with_numpy(state: Any) -> Any:
    """Return the state that `without_numpy` was given.

    >>> with_numpy(without_numpy({"at": np.arange(3)}))
    {'at': array([0, 1, 2])}
    """
    return _from_plain(state) if isinstance(state, dict) and _MARK in state else _over(state, with_numpy)


def _as_plain(value: np.generic | np.ndarray) -> dict[str, Any]:
    data = value.tobytes()
    if isinstance(value, np.generic):
        return {_MARK: value.dtype.str, "shape": None, "data": data.hex()}
    held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return {_MARK: value.dtype.str, "shape": list(value.shape), "data": held}


def _from_plain(state: dict[str, Any]) -> np.generic | np.ndarray:
    dtype, shape, data = np.dtype(state[_MARK]), state["shape"], state["data"]
    if shape is None:
        scalar: np.generic = np.frombuffer(bytes.fromhex(data), dtype)[0]
        return scalar
    return np.frombuffer(data.numpy().tobytes(), dtype).reshape(shape).copy()


def _over(state: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a container with its entries converted; the same one if none changes, or if it is of another type."""
    if type(state) is dict:
        converted = {
            name: other
            for name, value in state.items()
            if type(value) not in _PLAIN and (other := convert(value)) is not value
        }
        return state | converted if converted else state
    if type(state) in (list, tuple) and not _PLAIN.issuperset(map(type, state)):
        others = [convert(value) for value in state]
        return state if all(map(operator.is_, others, state)) else type(state)(others)
    return state
