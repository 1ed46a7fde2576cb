"""Segments of every kind keep one contract."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import TransportError
from penstock.core.shared_segment import Handle, MemfdSegment, NamedSegment, PrivateSegment, attach, create


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


@pytest.mark.parametrize("make", [lambda: MemfdSegment(4096), lambda: NamedSegment(4096), lambda: PrivateSegment(4096)])
def test_a_view_outlives_close(make) -> None:
    segment = make()
    view = np.frombuffer(segment.memory, np.uint8)
    view[:] = 3
    segment.close()
    assert view.sum() == 3 * 4096


def test_a_named_segment_leaves_no_name_behind() -> None:
    segment = NamedSegment(4096)
    name = segment.handle().name
    assert (Path("/dev/shm") / str(name)).exists()
    segment.close()
    assert not (Path("/dev/shm") / str(name)).exists()


@pytest.mark.parametrize("make", [lambda: create(1 << 55, named=True), lambda: PrivateSegment(1 << 62)])
def test_more_than_the_machine_has_is_one_clear_error(make) -> None:
    with pytest.raises(TransportError, match=r"EiB|GiB.*(shm-size|lower batch_size)"):
        make()


def test_a_private_segment_cannot_travel() -> None:
    segment = PrivateSegment(4096)
    with pytest.raises(TransportError, match="cannot be shared"):
        segment.handle()
