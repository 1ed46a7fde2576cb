"""Whether this process has taken part in a collective operation since some moment."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def collective_count() -> int | None:
    """Return a number that changes with each collective this process takes part in; None where nobody counts them.

    The sum of the sequence numbers of all process groups: those that torch compares when it looks for ranks that have
    come apart. (Not counted: collectives that a CUDA graph replays, and those of other libraries.)
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    groups: Any = distributed_c10d._world.pg_map
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in list(groups))
    except (AttributeError, RuntimeError):  # another version of torch, or a backend that does not count
        return None
