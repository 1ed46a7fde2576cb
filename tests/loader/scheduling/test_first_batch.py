"""The first epoch of num_workers="auto": the first batch tells how many workers there are; batches are torch's."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, get_worker_info

from penstock import DataLoader, WorkerStartError
from penstock.loader.scheduling import scaling_pool
from penstock.loader.scheduling.auto_workers import AutoWorkers
from penstock.loader.scheduling.batch import Batch
from penstock.loader.scheduling.scaling_pool import FirstBatch
from penstock.loader.workers.messages import Result
from penstock.loader.workers.process_pool import ProcessPool
from penstock.loader.workers.stream_shard import StreamShard

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

MS = 1_000_000


class FakePool:
    """Has one process, and takes the number that is planned unless one is settled."""

    def __init__(self, *, settled: int | None = None, row: int = 0, ready: bool = True) -> None:
        self.processes = [SimpleNamespace(pid=os.getpid())]
        self.settled, self.row, self.ready = settled, row, ready

    def plan_workers(self, workers: int) -> int:
        return workers if self.settled is None else self.settled

    def is_ready(self, worker: int) -> bool:
        return self.ready

    def current_task(self, worker: int) -> tuple[None, int]:
        return None, self.row


def chosen(pool: FakePool, batch: Batch | None, *, has_crashed: bool = False) -> int:
    first = FirstBatch(pool, AutoWorkers(workers=1, most=2, most_waiting=32), batches=1000, prefetch_factor=2)
    return first.choose(batch, 500 * MS, has_crashed=has_crashed)


def test_a_batch_that_is_not_finished_is_judged_by_what_its_worker_has_done_so_far(monkeypatch) -> None:
    monkeypatch.setattr(scaling_pool, "available_nbytes", lambda: 1 << 40)
    batch = Batch(0, list(range(8)), None)
    for on_core_ns, wanted in ((5 * MS, 32), (500 * MS, 2)):
        monkeypatch.setattr(scaling_pool, "process_times", lambda pid, on_core_ns=on_core_ns: (on_core_ns, 0))
        assert chosen(FakePool(row=2), batch) == wanted
    monkeypatch.setattr(scaling_pool, "process_times", lambda pid: (5 * MS, 0))
    assert chosen(FakePool(ready=False), batch) == 1
    assert chosen(FakePool(), batch, has_crashed=True) == 1
    assert chosen(FakePool(settled=1), batch) == 1
    monkeypatch.setattr(scaling_pool, "process_times", lambda pid: None)
    assert chosen(FakePool(), batch) == 1


def test_batches_that_take_much_memory_limit_the_workers(monkeypatch) -> None:
    monkeypatch.setattr(scaling_pool, "available_nbytes", lambda: 8 << 30)
    monkeypatch.setattr(scaling_pool, "private_nbytes", lambda pid: 10 << 20)
    waited = Batch(0, [0], None)
    waited.is_made = True
    waited.result = Result()
    waited.result.fetch_ns, waited.result.busy_ns = 100 * MS, MS
    assert chosen(FakePool(), waited) == 32
    waited.result.nbytes = 246 << 20  # two of them, and twice 10 MiB: a quarter of 8 GiB holds four of that
    assert chosen(FakePool(), waited) == 4


# ── with real workers ───────────────────────────────────────────────────────────────────────────────────────


class Telling(Dataset):
    """Samples that depend on their worker in all ways but its count, which `asks` looks up."""

    def __init__(self, asks: str = "") -> None:
        self.asks, self.made = asks, 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        self.made += 1
        count = -1
        if self.asks == "at once" or (self.asks == "later" and self.made > 4):
            count = info.num_workers
        elif self.asks == "pickled":
            count = pickle.loads(pickle.dumps(copy.copy(info))).num_workers
        elif self.asks == "printed":
            count = int(repr(info).partition("num_workers=")[2].partition(",")[0])
        values = [index, self.made, info.id, info.seed, count, random.random(), torch.rand(()).item()]
        return torch.tensor(values, dtype=torch.float64)


def planned(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Have first batches show that so many workers are needed, on a machine with three cores, however busy it is."""
    monkeypatch.setattr("penstock.loader.scheduling.scheduler.LOOK_NS", 600 * 10**9)
    for module in ("config", "dataloader"):
        monkeypatch.setattr(f"penstock.loader.{module}.cores_of_rank", lambda: 3)

    def plan(auto: AutoWorkers, work_ns: int, busy_ns: int, *, batches: int, most: int) -> None:
        assert (batches, most > 0) == (15, True)
        auto.workers, auto.reason = workers, "planned"

    monkeypatch.setattr(AutoWorkers, "plan_first", plan)


def batches_of(kind: type[TorchDataLoader], dataset: Dataset, workers: object) -> tuple[list[str], object]:
    torch.manual_seed(3)
    loader = kind(dataset, batch_size=4, num_workers=workers, shuffle=True)
    return [repr(batch) for batch in loader], loader


@pytest.mark.parametrize(("asks", "wanted"), [("", 5), ("later", 5), ("at once", 2), ("pickled", 2), ("printed", 2)])
def test_the_first_epochs_batches_are_torchs_for_the_number_that_is_chosen(asks, wanted, monkeypatch) -> None:
    planned(monkeypatch, 5)
    own, loader = batches_of(DataLoader, Telling(asks), "auto")
    assert loader.statistics().workers == wanted
    monkeypatch.setattr(TorchDataLoader, "check_worker_number_rationality", lambda loader: None)
    assert own == batches_of(TorchDataLoader, Telling(asks), wanted)[0]


def test_where_the_system_starts_fewer_the_batches_are_torchs_for_those(monkeypatch) -> None:
    planned(monkeypatch, 5)
    spawn = ProcessPool._spawn

    def refuse(pool: ProcessPool, worker: int, shards: dict[int, StreamShard]) -> BaseProcess:
        if worker >= 3:
            raise WorkerStartError("no more processes")
        return spawn(pool, worker, shards)

    monkeypatch.setattr(ProcessPool, "_spawn", refuse)
    own, loader = batches_of(DataLoader, Telling("later"), "auto")
    statistics = loader.statistics()
    assert statistics.workers == 3
    assert "the system starts no more" in statistics.workers_reason
    assert own == batches_of(TorchDataLoader, Telling("later"), 3)[0]


class Fatal(Numbered):
    """Kills the first worker that makes sample 0."""

    def __init__(self, mark: Path) -> None:
        super().__init__(60)
        self.mark = mark

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 0 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:A DataLoader worker is killed:RuntimeWarning")
def test_a_worker_that_dies_at_the_first_batch_is_replaced_and_the_guess_counts(tmp_path, monkeypatch) -> None:
    planned(monkeypatch, 5)
    loader = DataLoader(Fatal(tmp_path / "dead"), batch_size=4, num_workers="auto")
    assert [label for _, labels in loader for label in labels.tolist()] == list(range(60))
    assert (loader.statistics().workers, loader.statistics().restarts) == (2, 1)


def test_a_sampler_that_might_be_noticed_to_draw_keeps_the_guess(monkeypatch) -> None:
    planned(monkeypatch, 5)
    loader = DataLoader(Numbered(60), batch_size=4, num_workers="auto", sampler=list(range(60)))
    assert len([*loader]) == 15
    assert loader.statistics().workers == 2
