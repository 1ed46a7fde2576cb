"""Feed a PyTorch program at the speed of its machine, and keep it inside of its memory.

The public names are imported when they are first used: `import penstock` starts nothing and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.errors import (
        ExtraError,
        OptionError,
        PenstockError,
        RankError,
        RecordError,
        ScriptError,
        SourceError,
        StateError,
        TransportError,
        UnpicklableError,
        WorkerError,
        WorkerKilledError,
        WorkerStartError,
        WorkerTimeoutError,
    )
    from penstock.core.stats import LoaderStatistics, RingCounts, StageTimes
    from penstock.device import Sim
    from penstock.feed.convert import Conversion, convert
    from penstock.feed.infer import infer
    from penstock.feed.loader import DataLoader
    from penstock.feed.padding import PadCollate
    from penstock.feed.sources.base import Source
    from penstock.feed.sources.open import open
    from penstock.feed.sources.ray_data import ray_dataset
    from penstock.feed.sources.stream import Stream
    from penstock.feed.sources.text import Tokenized
    from penstock.feed.sources.token_batches import TokenBatches
    from penstock.feed.workers.maker import SKIP
    from penstock.feed.workers.sample_seed import sample_rng, sample_seed
    from penstock.memory.explain import OutOfMemoryError
    from penstock.memory.guard import OOMGuard
    from penstock.memory.leaks import Leak, watch_leaks
    from penstock.memory.ledger import Ledger, ledger
    from penstock.memory.microbatch import split_batch
    from penstock.memory.planner import plan
    from penstock.memory.release import Released, release
    from penstock.memory.step import StepStatistics, TrainStep
    from penstock.memory.ways import Plan

__version__ = "0.1.0"

__all__ = [
    "SKIP",
    "Conversion",
    "DataLoader",
    "ExtraError",
    "Leak",
    "Ledger",
    "LoaderStatistics",
    "OOMGuard",
    "OptionError",
    "OutOfMemoryError",
    "PadCollate",
    "PenstockError",
    "Plan",
    "RankError",
    "RecordError",
    "Released",
    "RingCounts",
    "ScriptError",
    "Sim",
    "Source",
    "SourceError",
    "StageTimes",
    "StateError",
    "StepStatistics",
    "Stream",
    "TokenBatches",
    "Tokenized",
    "TrainStep",
    "TransportError",
    "UnpicklableError",
    "WorkerError",
    "WorkerKilledError",
    "WorkerStartError",
    "WorkerTimeoutError",
    "__version__",
    "convert",
    "infer",
    "ledger",
    "open",
    "plan",
    "ray_dataset",
    "release",
    "sample_rng",
    "sample_seed",
    "split_batch",
    "watch_leaks",
]

_HOMES = {
    "penstock.core.errors": (
        "ExtraError",
        "OptionError",
        "PenstockError",
        "RankError",
        "RecordError",
        "ScriptError",
        "SourceError",
        "StateError",
        "TransportError",
        "UnpicklableError",
        "WorkerError",
        "WorkerKilledError",
        "WorkerStartError",
        "WorkerTimeoutError",
    ),
    "penstock.core.stats": ("LoaderStatistics", "RingCounts", "StageTimes"),
    "penstock.device": ("Sim",),
    "penstock.feed.convert": ("Conversion", "convert"),
    "penstock.feed.infer": ("infer",),
    "penstock.feed.loader": ("DataLoader",),
    "penstock.feed.padding": ("PadCollate",),
    "penstock.feed.sources.base": ("Source",),
    "penstock.feed.sources.open": ("open",),
    "penstock.feed.sources.ray_data": ("ray_dataset",),
    "penstock.feed.sources.stream": ("Stream",),
    "penstock.feed.sources.text": ("Tokenized",),
    "penstock.feed.sources.token_batches": ("TokenBatches",),
    "penstock.feed.workers.maker": ("SKIP",),
    "penstock.feed.workers.sample_seed": ("sample_rng", "sample_seed"),
    "penstock.memory.explain": ("OutOfMemoryError",),
    "penstock.memory.guard": ("OOMGuard",),
    "penstock.memory.ledger": ("Ledger", "ledger"),
    "penstock.memory.leaks": ("Leak", "watch_leaks"),
    "penstock.memory.microbatch": ("split_batch",),
    "penstock.memory.planner": ("plan",),
    "penstock.memory.release": ("Released", "release"),
    "penstock.memory.step": ("StepStatistics", "TrainStep"),
    "penstock.memory.ways": ("Plan",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: object) -> None:
    """Do what `%load_ext penstock` asks for in a notebook: from then on torch's DataLoader is penstock's."""
    import_module("penstock.launch.notebook").load(ipython)


def unload_ipython_extension(ipython: object) -> None:
    """Put torch's DataLoader back (`%unload_ext penstock`)."""
    import_module("penstock.launch.notebook").unload(ipython)
