"""The other loaders of the field, one file each; a file imports its peer only when it is asked to load."""

from __future__ import annotations

from benchmarks.adapters import OURS, TORCH, DataLoaderAdapter, LoaderAdapter
from benchmarks.peers.dali import Dali
from benchmarks.peers.ffcv_loader import Ffcv
from benchmarks.peers.grain_loader import Grain
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.litdata_loader import LitData
from benchmarks.peers.mosaic_streaming import MosaicStreaming
from benchmarks.peers.spdl_pipeline import SpdlSubprocess, SpdlThreads, SpdlTorch
from benchmarks.peers.tf_data import TfData
from benchmarks.peers.torchdata_nodes import TorchdataNodes

PEERS: tuple[LoaderAdapter, ...] = (
    DataLoaderAdapter("penstock, threads", "penstock", worker_type="thread"),
    TorchdataNodes("thread"),
    TorchdataNodes("process"),
    SpdlThreads(),
    SpdlSubprocess(),
    SpdlTorch(),
    Grain(),
    HuggingFace(),
    LitData(),
    MosaicStreaming(),
    Dali(),
    Ffcv(),
    TfData(),
)


def adapter_named(name: str) -> LoaderAdapter:
    """Return the adapter of that name."""
    return {one.name: one for one in (OURS, TORCH, *PEERS)}[name]
