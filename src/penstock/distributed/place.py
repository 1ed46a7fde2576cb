"""This process's place among the ranks of its job; imports nothing of penstock's but core, so that workers may ask."""

from __future__ import annotations

import os

import torch.distributed as dist

from penstock.core.ranks import Ranks


def place(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return the rank and how many there are: of `torch.distributed`, or of the environment that torchrun makes.

    Args:
        group: among whom; among all without it.

    >>> place()
    (0, 1)
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    ranks = Ranks.of(os.environ, os.getppid())
    return ranks.rank, ranks.world_size
