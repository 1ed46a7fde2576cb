"""How many examples hypothesis tries: few in `make quick` and `make test`, many in a nightly `make thorough`."""

from __future__ import annotations

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "usual")
"""quick, usual or thorough."""


def load_profile() -> None:
    """Choose the number of examples of all tests that do not choose theirs."""
    for name, count in (("quick", 5), ("usual", 40), ("thorough", 400)):
        settings.register_profile(name, max_examples=count)
    settings.load_profile(PROFILE)


def examples(count: int) -> int:
    """Return how many examples a test tries that chooses their number: `count` in a thorough run."""
    return {"quick": max(2, count // 20), "usual": max(3, count // 3), "thorough": count}[PROFILE]
