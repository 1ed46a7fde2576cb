"""The other loaders of the field, one file each; a file imports its peer only when it is asked to load."""

from __future__ import annotations

from benchmarks.contestants import OURS, TORCH, Contestant, DropIn
from benchmarks.peers.dali import Dali
from benchmarks.peers.ffcv_loader import Ffcv
from benchmarks.peers.spdl_pipeline import SpdlSubprocess, SpdlThreads
from benchmarks.peers.tf_data import TfData
from benchmarks.peers.torchdata_nodes import TorchdataNodes

PEERS: tuple[Contestant, ...] = (
    DropIn("penstock, threads", "penstock", workers="thread"),
    TorchdataNodes("thread"),
    TorchdataNodes("process"),
    SpdlThreads(),
    SpdlSubprocess(),
    Dali(),
    Ffcv(),
    TfData(),
)


def contestant_named(name: str) -> Contestant:
    """Return the contestant of that name."""
    return {one.name: one for one in (OURS, TORCH, *PEERS)}[name]
