"""Remote folders are listed once for each `penstock.open`, and with `distributed=` once for all ranks of the job.

A bucket of a million objects takes a thousand requests, one after another: to guess the format would make them twice,
and each rank again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from penstock.core.errors import OptionError, PenstockError, SourceError
from penstock.distributed.rank import Distributed, place_in


@dataclass(frozen=True, slots=True)
class _Listings:
    group: ProcessGroup | None = None
    is_shared: bool = False
    known: dict[tuple[str, str], list[Any]] = field(default_factory=dict)


_Listed = TypeVar("_Listed")
_current: ContextVar[_Listings | None] = ContextVar("_current", default=None)


@contextmanager
def kept_listings(distributed: Distributed) -> Iterator[None]:
    """Keep what is listed in the `with` block, in this thread.

    Args:
        distributed: whether all ranks of the job, or of a group or mesh, come by: then its first one lists for all.

    Raises:
        OptionError: there are several ranks, and torch.distributed is not initialized; or this one is not in the group.
    """
    listings = _Listings()
    _, size = place_in(distributed)
    if distributed is not False:
        group = None if isinstance(distributed, bool) else distributed
        if not (dist.is_available() and dist.is_initialized()):
            if size > 1:
                raise OptionError(
                    f"there are {size} ranks, and torch.distributed does not know them yet; call init_process_group "
                    "before penstock.open(..., distributed=True)"
                )
        else:
            listings = _Listings(group.get_group() if isinstance(group, DeviceMesh) else group, is_shared=size > 1)
    token = _current.set(listings)
    try:
        yield
    finally:
        _current.reset(token)


def listed(kind: str, url: str, make: Callable[[], list[_Listed]]) -> list[_Listed]:
    """Return a listing that is kept, or else what `make` returns here or on the first rank."""
    listings = _current.get()
    if listings is None:
        return make()
    key = kind, url
    if key not in listings.known:
        listings.known[key] = _broadcast(key, make, listings.group) if listings.is_shared else make()
    return listings.known[key]


def _broadcast(key: tuple[str, str], make: Callable[[], list[Any]], group: ProcessGroup | None) -> list[Any]:
    first = 0 if group is None else dist.get_global_rank(group, 0)
    told: list[tuple[tuple[str, str], list[Any] | str]] = [(key, "")]
    failure: Exception | None = None
    if dist.get_rank() == first:
        try:
            told = [(key, make())]
        except Exception as error:  # noqa: BLE001 - the others wait for an answer, whatever it is
            failure, told = error, [(key, str(error) if isinstance(error, PenstockError) else repr(error))]
    dist.broadcast_object_list(told, src=first, group=group)
    if failure is not None:
        raise failure
    found_key, found = told[0]
    if found_key != key:
        raise OptionError(
            f"with distributed= one rank lists for all, and rank {first} opens {found_key[1]} while this one opens "
            f"{key[1]}; leave it out where ranks open different paths"
        )
    if isinstance(found, str):
        raise SourceError(f"{found} (on rank {first}, which lists for all)")
    return found
