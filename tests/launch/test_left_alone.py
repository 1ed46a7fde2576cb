"""Loaders that penstock does not replace run as they do without it, and the report says what became of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch.programs import penstock, python, script
from scripts import written
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset
from torch.utils.data import dataloader as torch_module

from penstock.launch.patch_torch import TorchPatch
from penstock.observe.live.loader_registry import LoaderRegistry

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated", "ignore::DeprecationWarning"),
]

CHECKPOINTS = """
    import sys, warnings
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(40)

    class OfRank(StatefulDataLoader, Stateful):  # as torchtitan's ParallelAwareDataloader
        def __init__(self, dataset, rank, **arguments):
            self.key = f"dp_rank_{rank}"
            super().__init__(dataset, **arguments)

        def state_dict(self):
            return {self.key: super().state_dict()}

        def load_state_dict(self, state):
            super().load_state_dict(state[self.key])

    def accelerated():
        configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
        loader = DataLoader(data, batch_size=4)  # Accelerate draws another order when it resumes one that is shuffled
        return Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)

    data = TensorDataset(torch.arange(40))
    loaders = {
        "torchdata": lambda: StatefulDataLoader(data, batch_size=4, shuffle=True),
        "workers": lambda: StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=2),
        "stream": lambda: StatefulDataLoader(Stream(), batch_size=4),
        "subclass": lambda: OfRank(data, 3, batch_size=4, shuffle=True),
        "accelerate": accelerated,
    }

    if __name__ == "__main__":
        warnings.simplefilter("ignore")
        mode, path = sys.argv[1:]
        kept = {} if mode == "save" else torch.load(path, weights_only=False)
        for name, make in loaders.items():
            torch.manual_seed(7)
            loader = make()
            assert isinstance(loader, DataLoader)
            if mode == "save":
                batches = iter(loader)
                seen = [torch.as_tensor(next(batches)[0]).tolist() for _ in range(3)]
                kept[name] = loader.state_dict(), torch.get_rng_state()
                print("begins", name, seen)
            else:
                loader.load_state_dict(kept[name][0])
                torch.set_rng_state(kept[name][1])
                batches = iter(loader)
            print(name, [torch.as_tensor(batch[0]).tolist() for batch in batches])
        torch.save(kept, path)
"""


def test_checkpoints_of_stateful_loaders_load_without_penstock_and_the_other_way_round(tmp_path: Path) -> None:
    path = script(tmp_path, CHECKPOINTS)
    watched = penstock(tmp_path, "run", "--quiet", path.name, "save", "watched.pt")
    plain = python(tmp_path, path.name, "save", "plain.pt")
    assert (watched.returncode, watched.stdout) == (0, plain.stdout), watched.stderr
    for loaded in (
        python(tmp_path, path.name, "load", "watched.pt"),
        penstock(tmp_path, "run", path.name, "load", "plain.pt"),
    ):
        assert loaded.returncode == 0, loaded.stderr
        assert loaded.stdout.splitlines() == [line for line in plain.stdout.splitlines() if line[:6] != "begins"]
    first, stream = _line_of("(data, batch_size=4, shuffle=True),"), _line_of("(Stream(),")
    assert f"TensorDataset ({first}): 28 samples in 7 batches" in loaded.stderr
    assert f"Stream ({stream}): 28 samples in 7 batches" in loaded.stderr
    assert loaded.stderr.count("iterator: own iterator of StatefulDataLoader, left alone") == 4
    assert "iterator: own iterator of OfRank, left alone" in loaded.stderr


def _line_of(words: str) -> str:
    (number,) = (number for number, line in enumerate(CHECKPOINTS.splitlines(), 1) if words in line)
    return f"train.py:{number}"


NODES = """
    import torch
    import torchdata.nodes
    from torch.utils.data import RandomSampler, default_collate

    def loader_of(seed):
        sampler = RandomSampler(range(40), generator=torch.Generator().manual_seed(seed))
        indices = torchdata.nodes.SamplerWrapper(sampler)
        rows = torchdata.nodes.ParallelMapper(indices, lambda i: torch.full((3,), i), num_workers=2, method="thread")
        return torchdata.nodes.Loader(torchdata.nodes.Mapper(torchdata.nodes.Batcher(rows, 5), default_collate))

    loader = loader_of(3)
    for _ in range(2):
        print([batch[:, 0].tolist() for batch in loader])
    batches = iter(loader)
    next(batches), next(batches)
    other = loader_of(3)
    other.load_state_dict(loader.state_dict())
    print(sorted(loader.state_dict()), len(list(other)))
"""


def test_torchdatas_nodes_are_left_alone_and_counted(tmp_path: Path) -> None:
    path = script(tmp_path, NODES)
    watched, plain = penstock(tmp_path, "run", path.name), python(tmp_path, path.name)
    assert (watched.returncode, watched.stdout) == (0, plain.stdout), watched.stderr
    line, _ = next((at, text) for at, text in enumerate(NODES.splitlines(), 1) if "nodes.Loader(" in text)
    assert f"ParallelMapper and 1 more like it (train.py:{line}): 120 samples in 24 batches" in watched.stderr
    assert "iterator: own iterator of Loader, left alone" in watched.stderr


KINDS = """
    import multiprocessing, queue, threading, torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

    class Queue(queue.Queue):
        close = cancel_join_thread = lambda self: None

    class Thread(threading.Thread):
        pid = property(id)

    class Threads(multiprocessing.context.SpawnContext):  # as MONAI's ThreadDataLoader(use_thread_workers=True)
        Process, Event = Thread, threading.Event

        @staticmethod
        def Queue(*_):
            return Queue()

    class Doubled(DataLoader):
        def __iter__(self):
            for (batch,) in super().__iter__():
                yield 2 * batch

    class Own(DataLoader):
        def __iter__(self):
            for indices in self.batch_sampler:
                yield self.collate_fn([self.dataset[index] for index in indices])

    class Uncounted(DataLoader):
        def __iter__(self):
            return iter([torch.arange(3)])

    class Inner(DataLoader):  # as litdata's StreamingDataLoader
        def _get_iterator(self):
            return _SingleProcessDataLoaderIter(self)

    class Never(DataLoader):
        pass

    data = TensorDataset(torch.arange(22))
    Never(data)
    for kind in (DataLoader, Doubled, Own, Uncounted, Inner):
        print(kind.__name__, list(kind(data, 4)))
    print(sorted(int(batch[0][0]) for batch in DataLoader(data, 4, num_workers=2, multiprocessing_context=Threads())))
"""


def test_the_report_and_run_json_say_what_iterates_each_loader(tmp_path: Path) -> None:
    path = script(tmp_path, KINDS)
    plain, run = python(tmp_path, path.name), penstock(tmp_path, "run", path.name)
    assert run.stdout == plain.stdout
    assert run.stdout.count("\n") > 5
    for words in (
        "TensorDataset (train.py:43): 22 samples in 6 batches",
        "iterator: subclass Doubled on penstock's iterator",
        "iterator: own iterator of Own, left alone",
        "TensorDataset #4 (train.py:43): own iterator of Uncounted, left alone; its batches were not counted",
        "iterator: own iterator of Inner, left alone",
        "iterator: fell back to torch's, because Process of its multiprocessing context is Thread, which is no process",
    ):
        assert words in run.stderr
    loaders = json.loads(written(tmp_path).read_text())["loaders"]
    found = {
        (one["loader_class"], one["iterator"], one["is_iterated"], one["statistics"]["samples"]) for one in loaders
    }
    assert found == {
        ("Never", "subclass", False, 0),
        ("DataLoader", "replaced", True, 22),
        ("Doubled", "subclass", True, 22),
        ("Own", "own", True, 22),
        ("Uncounted", "own", True, 0),
        ("Inner", "own", True, 22),
        ("DataLoader", "fallback", True, 22),
    }


def test_a_loader_that_is_left_alone_is_not_compared(tmp_path: Path) -> None:
    text = """
        import time, torch
        from torchdata.stateful_dataloader import StatefulDataLoader
        for batch in StatefulDataLoader(torch.arange(40.0)):
            time.sleep(0.001)
    """
    run = penstock(tmp_path, "run", "--baseline", script(tmp_path, text).name)
    assert "no comparison: nothing was replaced" in run.stderr
    baseline = json.loads(written(tmp_path).read_text())["baseline"]
    assert (baseline["torch"], baseline["penstock"]) == (None, None)


# ── in this process ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def registry() -> Iterator[LoaderRegistry]:
    """Replace torch's loader for the length of a test."""
    registry = LoaderRegistry()
    patch = TorchPatch(registry)
    patch.install()
    yield registry
    patch.remove()


def test_a_replaced_loader_has_no_method_that_programs_look_for_in_vain_in_torchs(registry: LoaderRegistry) -> None:
    loader: Any = torch.utils.data.DataLoader(torch.arange(4.0))
    assert type(loader).__module__ == "penstock.loader.dataloader"
    for name in ("state_dict", "load_state_dict", "set_epoch"):
        assert not hasattr(loader, name)


class Short(IterableDataset[int]):
    """A stream whose last batch is short."""

    def __iter__(self) -> Iterator[int]:
        yield from range(7)


def test_batches_of_torchs_iterators_are_counted_whatever_way_they_come(registry: LoaderRegistry) -> None:
    stream = TorchDataLoader(Short(), batch_size=4)
    persistent = TorchDataLoader(torch.arange(10), batch_size=4, num_workers=1, persistent_workers=True)
    several = TorchDataLoader(torch.arange(10), batch_sampler=[[0], [1, 2, 3], [4, 5]], collate_fn=lambda batch: None)
    single = TorchDataLoader(torch.arange(5), batch_size=None)
    list(stream)
    for _ in range(2):
        list(persistent)
    next(iter(several))
    list(several)
    list(single)
    counts = [one.statistics for one in registry.records()]
    assert [(one.batches, one.samples, one.epochs) for one in counts] == [(2, 7, 1), (6, 20, 2), (4, 7, 1), (5, 5, 1)]
    assert all(one.first_batch_s > 0 and one.stages.wait_s > 0 for one in counts)
    assert [one.length for one in counts] == [None, 3, 3, 5]
    persistent._iterator._shutdown_workers()


def test_a_stateful_loader_that_nobody_iterates_takes_no_number(registry: LoaderRegistry) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loaders = [StatefulDataLoader(torch.arange(4.0)) for _ in range(2)]
    loaders[0].state_dict()  # makes an iterator
    assert registry.iterated() == []
    list(loaders[1])
    assert [one.label for one in registry.iterated()] == [registry.loaders[1].label]
    assert "#" not in registry.loaders[1].label


def test_the_classes_of_torch_and_torchdata_are_restored() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    kinds = (torch_module._SingleProcessDataLoaderIter, torch_module._BaseDataLoaderIter, StatefulDataLoader)
    before = [dict(kind.__dict__) for kind in kinds]
    patch = TorchPatch(LoaderRegistry())
    patch.install()
    assert [dict(kind.__dict__) for kind in kinds] != before
    patch.remove()
    assert [dict(kind.__dict__) for kind in kinds] == before
    assert torch.utils.data.DataLoader is TorchDataLoader
