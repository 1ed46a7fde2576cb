"""Slabs of every kind keep one contract."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import TransportError
from penstock.feed.transport.slab import Handle, MemfdSlab, NamedSlab, PrivateSlab, attach, create


@pytest.mark.parametrize("named", [False, True])
def test_what_one_side_writes_the_other_reads(named: bool) -> None:
    ours = create(10_000, named=named)
    handle = ours.handle()
    theirs = attach(Handle(handle.nbytes, None if handle.fd is None else os.dup(handle.fd), handle.name))
    ours.memory[5] = 7
    assert theirs.memory[5] == 7
    assert ours.nbytes == 12_288
    theirs.close()
    ours.close()


@pytest.mark.parametrize("make", [lambda: MemfdSlab(4096), lambda: NamedSlab(4096), lambda: PrivateSlab(4096)])
def test_a_view_outlives_close(make) -> None:
    slab = make()
    view = np.frombuffer(slab.memory, np.uint8)
    view[:] = 3
    slab.close()
    assert view.sum() == 3 * 4096


def test_a_named_slab_leaves_no_name_behind() -> None:
    slab = NamedSlab(4096)
    name = slab.handle().name
    assert (Path("/dev/shm") / str(name)).exists()
    slab.close()
    assert not (Path("/dev/shm") / str(name)).exists()


def test_whoever_is_given_a_named_slab_removes_the_name() -> None:
    maker = create(4096, named=True)
    handle = maker.give_away()
    maker.close()
    owner = attach(handle, own=True)
    owner.close()
    assert not (Path("/dev/shm") / str(handle.name)).exists()


def test_more_than_the_machine_has_is_one_clear_error() -> None:
    with pytest.raises(TransportError, match=r"EiB|GiB.*(shm-size|lower batch_size)"):
        create(1 << 55, named=True)


def test_a_private_slab_cannot_travel() -> None:
    slab = PrivateSlab(4096)
    with pytest.raises(TransportError, match="cannot be shared"):
        slab.handle()
