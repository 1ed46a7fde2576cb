"""rank_and_world_size: this process's rank in its job. Imports only core, so that worker processes may use it."""

from __future__ import annotations

import os

import torch.distributed as dist

from penstock.core.ranks import Ranks


def rank_and_world_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return (rank, world size): of `torch.distributed` if it is initialized, else of torchrun's environment variables.

    Args:
        group: the process group; the default one without it.

    >>> rank_and_world_size()
    (0, 1)
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    ranks = Ranks.of(os.environ, os.getppid())
    return ranks.rank, ranks.world_size
