"""Equality of nested states, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Assert bitwise equality of everything in two nested states."""
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{number}]")
    else:
        assert one == other, path
