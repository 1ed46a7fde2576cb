"""How much tests try that could try more: little in `make quick` and `make test`, all in a nightly `make thorough`."""

from __future__ import annotations

import os
import zlib

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "usual")
"""quick, usual or thorough."""


def load_profile() -> None:
    """Choose the number of examples of all tests that do not choose theirs; how long one takes fails no test."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # tests/cuda needs pytest, torch and NumPy alone
        return
    for name, count in (("quick", 5), ("usual", 40), ("thorough", 400)):
        settings.register_profile(name, max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile(PROFILE)


def examples(count: int) -> int:
    """Return how many examples a test tries that chooses their number: `count` in a thorough run."""
    return {"quick": max(2, count // 20), "usual": max(3, count // 3), "thorough": count}[PROFILE]


def places(count: int, case: str, stride: int = 3) -> range:
    """Return at which of `count` places to fail: all of them in a thorough run, else every `stride`-th.

    The first one follows from `case`, so that the cases of a test try different places, and each run the same ones.
    """
    if PROFILE == "thorough":
        return range(count)
    return range(zlib.crc32(case.encode()) % stride, count, stride)
