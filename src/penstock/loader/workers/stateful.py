"""torchdata's protocol of objects that save and restore their state."""

from __future__ import annotations

from typing import Any


def is_stateful(candidate: Any) -> bool:
    """Return whether an object has both `state_dict` and `load_state_dict`."""
    return callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None))
