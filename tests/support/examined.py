"""Examines loops on machines that do other work as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.measurements import Measurements


def examine_until(is_enough: Callable[[Measurements], bool], loop: Any, seconds: float) -> Measurements:
    """Examine `loop`, for longer while not enough was seen: beside other work everything takes longer."""
    for patience in (1, 5, 25):
        found = examine(loop, seconds=patience * seconds)
        if is_enough(found):
            break
    return found
