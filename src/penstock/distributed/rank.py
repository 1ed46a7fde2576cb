"""rank_and_world_size, place_in, ranks_of: who is in a job or a group. Worker processes may import it."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.core.errors import OptionError
from penstock.core.ranks import Ranks

Distributed = bool | dist.ProcessGroup | DeviceMesh
"""What `distributed=` may be."""


def rank_and_world_size(group: dist.ProcessGroup | DeviceMesh | None = None) -> tuple[int, int]:
    """Return (rank, world size): of `torch.distributed` if it is initialized, else of torchrun's environment variables.

    Args:
        group: the process group, or a mesh of one dimension; the default group without it. The rank of a process that
            is not in the group is -1.

    Raises:
        OptionError: the mesh has several dimensions, or this process is not in it.

    >>> rank_and_world_size()
    (0, 1)
    """
    if isinstance(group, DeviceMesh):
        group = _group_of(group)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    ranks = Ranks.of(os.environ, os.getppid())
    return ranks.rank, ranks.world_size


def place_in(distributed: Distributed) -> tuple[int, int]:
    """Return (rank, world size) among the ranks that an argument `distributed=` means: of the job, or of a group.

    Raises:
        OptionError: it is something else, or a group that this process is not in.
    """
    given: object = distributed
    is_member = given != dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns elsewhere is no ProcessGroup
    if is_member and not isinstance(given, (bool, dist.ProcessGroup, DeviceMesh)):
        raise OptionError(f"distributed must be True, False, a process group or a DeviceMesh, not {given!r}")
    rank, world_size = rank_and_world_size(None if isinstance(distributed, bool) else distributed)
    if not is_member or rank < 0:
        raise OptionError("distributed= is a process group that this process is not in; give the one that it is in")
    return rank, world_size


def ranks_of(distributed: Distributed) -> tuple[int, ...]:
    """Return the ranks that an argument `distributed=` means, by their numbers in `torch.distributed`.

    Empty where that is not initialized, or there is no such argument.
    """
    if distributed is False or not (dist.is_available() and dist.is_initialized()):
        return ()
    group = _group_of(distributed) if isinstance(distributed, DeviceMesh) else distributed
    return tuple(dist.get_process_group_ranks(None if isinstance(group, bool) else group))


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise OptionError(
            f"distributed= is a mesh of {mesh.ndim} dimensions {names}, and ranks along some of them may need the same "
            "samples; give the one along which samples are shared out, as in mesh['dp'] (_flatten() makes several one)"
        )
    if mesh.get_coordinate() is None:
        raise OptionError("distributed= is a mesh that this process is not in; give the one that it is in")
    return mesh.get_group()
