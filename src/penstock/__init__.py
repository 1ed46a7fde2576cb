"""Feed a PyTorch program at the speed of its machine, and keep it inside of its memory.

The public names are imported when they are first used: `import penstock` starts nothing and does not import torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # `typing` would be imported from the current folder, see __main__.py
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
    from penstock.data.convert import Conversion, convert
    from penstock.data.formats.tokens.token_batches import TokenBatches
    from penstock.data.formats.tokens.tokenize import Tokenized
    from penstock.data.mixture import Mixture, mix
    from penstock.data.open import open
    from penstock.data.ray_data import ray_dataset
    from penstock.data.shared import shared
    from penstock.data.source import Source, cached
    from penstock.data.storage.storage import Storage
    from penstock.data.stream import Stream
    from penstock.device import Sim
    from penstock.inference.infer import infer
    from penstock.loader.padding import PadCollate
    from penstock.loader.stateful_loader import DataLoader
    from penstock.loader.workers.sample_seed import sample_rng, sample_seed
    from penstock.loader.workers.worker_spec import SKIP
    from penstock.memory.accounting.leaks import watch_leaks
    from penstock.memory.accounting.ledger import ledger
    from penstock.memory.accounting.release import release
    from penstock.memory.backward_step import BackwardStep
    from penstock.memory.eval_step import EvalStep
    from penstock.memory.frameworks.survive_oom import survive_oom
    from penstock.memory.planning.planner import plan
    from penstock.memory.recovery.out_of_memory import OutOfMemoryError
    from penstock.memory.train_step import TrainStep

__version__ = "0.1.0"

__all__ = [
    "SKIP",
    "BackwardStep",
    "Conversion",
    "DataLoader",
    "EvalStep",
    "ExtraError",
    "LoaderStatistics",
    "Mixture",
    "OptionError",
    "OutOfMemoryError",
    "PadCollate",
    "PenstockError",
    "RankError",
    "RecordError",
    "RingCounts",
    "ScriptError",
    "Sim",
    "Source",
    "SourceError",
    "StageTimes",
    "StateError",
    "Storage",
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
    "cached",
    "convert",
    "infer",
    "ledger",
    "mix",
    "open",
    "plan",
    "ray_dataset",
    "release",
    "sample_rng",
    "sample_seed",
    "shared",
    "survive_oom",
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
    "penstock.data.convert": ("Conversion", "convert"),
    "penstock.inference.infer": ("infer",),
    "penstock.loader.stateful_loader": ("DataLoader",),
    "penstock.loader.padding": ("PadCollate",),
    "penstock.data.shared": ("shared",),
    "penstock.data.source": ("Source", "cached"),
    "penstock.data.storage.storage": ("Storage",),
    "penstock.data.mixture": ("Mixture", "mix"),
    "penstock.data.open": ("open",),
    "penstock.data.ray_data": ("ray_dataset",),
    "penstock.data.stream": ("Stream",),
    "penstock.data.formats.tokens.tokenize": ("Tokenized",),
    "penstock.data.formats.tokens.token_batches": ("TokenBatches",),
    "penstock.loader.workers.worker_spec": ("SKIP",),
    "penstock.loader.workers.sample_seed": ("sample_rng", "sample_seed"),
    "penstock.memory.recovery.out_of_memory": ("OutOfMemoryError",),
    "penstock.memory.frameworks.survive_oom": ("survive_oom",),
    "penstock.memory.backward_step": ("BackwardStep",),
    "penstock.memory.eval_step": ("EvalStep",),
    "penstock.memory.accounting.ledger": ("ledger",),
    "penstock.memory.accounting.leaks": ("watch_leaks",),
    "penstock.memory.planning.planner": ("plan",),
    "penstock.memory.accounting.release": ("release",),
    "penstock.memory.train_step": ("TrainStep",),
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
