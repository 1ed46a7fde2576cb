"""What `import penstock` gives is a promise, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import penstock

NAMES = """
BackwardStep Conversion DataLoader EvalStep ExtraError LoaderStatistics Mixture
OptionError OutOfMemoryError PadCollate PenstockError RankError RecordError RingCounts SKIP
ScriptError Sim Source SourceError StageTimes StateError Storage Stream TokenBatches Tokenized
TrainStep TransportError UnpicklableError WorkerError WorkerKilledError WorkerStartError WorkerTimeoutError
__version__ cached convert infer ledger mix open plan ray_dataset release sample_rng sample_seed shared
survive_oom watch_leaks
"""


def test_the_public_names_are_these() -> None:
    assert sorted(penstock.__all__) == sorted(NAMES.split())
    assert all(getattr(penstock, name) is not None for name in NAMES.split())
    assert set(NAMES.split()) <= set(dir(penstock))


def test_importing_penstock_imports_neither_torch_nor_starts_a_thread() -> None:
    code = "import penstock, sys, threading; print('torch' in sys.modules, threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False 1\n"


def test_a_worker_imports_nothing_of_the_training_side() -> None:
    code = (
        "import penstock.loader.workers.process_main, sys; "
        "print([m for m in sys.modules if m.startswith(('penstock.device', 'penstock.observe', 'penstock.launch', "
        "'penstock.loader.dataloader', 'penstock.loader.scheduling.scheduler', 'rich'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
