"""Ranks: this process's rank in its job, from the environment variables of torchrun.

Source: PyTorch's "torchrun (Elastic Launch)", the section on environment variables. Other launchers (`accelerate
launch`, Lightning, DeepSpeed) set the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process's rank, and the world size, in the job and on this machine."""

    rank: int = 0
    """Its number among all ranks."""

    world_size: int = 1
    """How many ranks there are."""

    local_rank: int = 0
    """Its number among the ranks of this machine."""

    local_world_size: int = 1
    """How many ranks this machine has."""

    node: int = 0
    """The number of this machine."""

    launch: str = ""
    """An identifier that the ranks started together on this machine share; empty for a single process."""

    @classmethod
    def of(cls, environment: Mapping[str, str], parent: int) -> Ranks:
        """Return the ranks in `environment`; a single rank if it has none.

        Args:
            environment: as `os.environ`.
            parent: the number of the process that started this one; ranks that were started together have the same.

        >>> Ranks.of({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1).local_ranks
        range(2, 4)
        """
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_rank = int(environment["LOCAL_RANK"])
            local_world_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
            node = int(environment.get("GROUP_RANK", 0))
        except (KeyError, ValueError):
            return cls()
        if world_size < 2:
            return cls()
        identity = repr((parent, [environment.get(name) for name in _LAUNCH]))
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node=node,
            launch=hashlib.sha256(identity.encode()).hexdigest()[:16],
        )

    @property
    def local_ranks(self) -> range:
        """The numbers, among all, of the ranks on this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)
