"""`share_on_machine`: an object that one rank of each machine makes, and its others get by a pickle."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.core.errors import OptionError, PenstockError
from penstock.distributed.rank import Distributed, place_in

_Made = TypeVar("_Made")


def share_on_machine(make: Callable[[], _Made], content: Callable[[], bytes], distributed: Distributed) -> _Made:
    """Return what `make` returns: here, or on the first rank of this machine among those of `distributed`.

    All of these ranks call it, at the same time. None waits for one that has failed.

    Args:
        make: makes what is good in another process of this machine when it is pickled, while this one has it.
        content: returns the same bytes on all ranks of a machine, or they share what is not the same.
        distributed: as of `penstock.open`.

    Raises:
        OptionError: torch.distributed is not initialized, the ranks of this machine share different things, or the
            first of them cannot make it.
    """
    _, size = place_in(distributed)
    if distributed is False or size == 1:
        return make()
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            f"there are {size} ranks, and torch.distributed does not know them yet; call init_process_group before "
            "distributed=True"
        )
    given = distributed.get_group() if isinstance(distributed, DeviceMesh) else distributed
    group = None if isinstance(given, bool) else given

    def gather(mine: Any) -> list[Any]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, mine, group=group)
        return found

    seen = gather((_machine(), content()))
    rank = dist.get_rank(group)
    first = next(number for number, (machine, _) in enumerate(seen) if machine == seen[rank][0])
    made, pickled, failure = None, b"", None
    if first == rank:
        try:
            made = make()
            pickled = pickle.dumps(made)
        except Exception as error:  # noqa: BLE001 - the others wait for an answer, whatever it is
            failure = error
    answers = gather((pickled, str(failure) if isinstance(failure, PenstockError) else repr(failure)))
    try:
        if first != rank and seen[first][1] == seen[rank][1] and answers[first][0]:
            made = pickle.loads(answers[first][0])
    finally:
        gather(None)  # the first one keeps it until all have it
    if failure is not None:
        raise failure
    if seen[first][1] != seen[rank][1]:
        raise OptionError(
            f"with distributed= the ranks of a machine share one, and rank {first} has it for something else than rank "
            f"{rank}; leave it out where they differ"
        )
    if made is None:
        raise OptionError(f"{answers[first][1]} (on rank {first}, which makes it for all of this machine)")
    return made


def _machine() -> str:
    """Return the same text for processes that may open each other's descriptors."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
