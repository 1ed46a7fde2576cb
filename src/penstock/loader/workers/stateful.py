"""torchdata's protocol of objects that save and restore their state."""

from __future__ import annotations

from typing import Any

from penstock.data.source import Source


def is_stateful(candidate: Any) -> bool:
    """Return whether an object has both `state_dict` and `load_state_dict`.

    A `Source` has them for those who iterate it, which no loader does: samples read by number have no position.
    """
    if getattr(type(candidate), "state_dict", None) is Source.state_dict:
        return False
    return callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None))
