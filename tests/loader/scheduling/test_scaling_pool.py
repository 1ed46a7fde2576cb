"""Workers that come and go while an epoch runs: no sample is lost, made twice or out of its place."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_sets import Augmented, Aware, Numbered, Stream
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset, TensorDataset, get_worker_info

from penstock import DataLoader, WorkerStartError
from penstock.loader.dataloader import enable_autoscaling, runtime_of
from penstock.loader.scheduling.auto_workers import AutoWorkers, BatchTiming
from penstock.loader.workers.pool import Pool
from penstock.loader.workers.process_pool import ProcessPool
from penstock.loader.workers.stream_shard import StreamShard
from penstock.tune import search

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def pretend_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    for module in ("config", "dataloader"):
        monkeypatch.setattr(f"penstock.loader.{module}.cores_of_rank", lambda: cores)


def compute_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first batch look as if it had only computed: on a busy machine it may wait for memory or disk."""
    plan = AutoWorkers.plan_first

    def plan_computed(auto: AutoWorkers, work_ns: int, busy_ns: int, **limits: int) -> None:
        plan(auto, work_ns, work_ns, **limits)

    monkeypatch.setattr(AutoWorkers, "plan_first", plan_computed)


class Scripted(AutoWorkers):
    """Wants what its script says, batch by batch, over and over."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(workers=script[0], most=max(4, *script))
        self.script, self.at = script, 0

    def observe(self, timing: BatchTiming) -> int:
        self.at += 1
        self.workers = self.script[self.at % len(self.script)]
        return self.workers

    def choose(self, *, is_fixed: bool) -> int:
        return self.workers


def scripted(dataset, script: list[int], **arguments) -> DataLoader:
    loader = DataLoader(dataset, num_workers=2, **{"dispatch": "demand", **arguments})
    runtime_of(loader).auto_workers = Scripted(script)
    return loader


class Uneven(Numbered):
    """Some samples are slow."""

    def __init__(self, size: int, slow: frozenset[int]) -> None:
        super().__init__(size, (3, 24, 24))
        self.slow = slow

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.02 if index in self.slow else 0.0003)
        return super().__getitem__(index)


def labels_of(loader: DataLoader, kills: dict[int, int] | None = None) -> list[int]:
    """Return the labels of an epoch; before batch b a worker is killed, if there is one."""
    batches = iter(loader)
    labels = []
    for number, (images, numbers) in enumerate(batches):
        assert torch.equal(images.flatten(1)[:, 0], numbers.float())
        labels += numbers.tolist()
        alive = [process for process in batches._workers if process.is_alive()]
        if kills and number in kills and alive:
            os.kill(alive[kills[number] % len(alive)].pid, signal.SIGKILL)
    return labels


scripts = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@settings(max_examples=examples(30), deadline=None)
@given(
    script=scripts,
    kills=st.dictionaries(st.integers(0, 60), st.integers(0, 3), max_size=4),
    slow=st.frozensets(st.integers(0, 599), max_size=12),
    batch_size=st.sampled_from([4, 10, 32]),
    in_order=st.booleans(),
)
def test_order_and_samples_are_exact_whatever_comes_and_goes(script, kills, slow, batch_size, in_order) -> None:
    loader = scripted(Uneven(600, slow), script, batch_size=batch_size, in_order=in_order, max_worker_crashes=100)
    labels = labels_of(loader, kills)
    assert (labels if in_order else sorted(labels)) == list(range(600))


@settings(max_examples=examples(15), deadline=None)
@given(script=scripts, epochs=st.integers(1, 3))
def test_order_and_samples_are_exact_with_threads_and_over_epochs(script, epochs) -> None:
    loader = scripted(Uneven(300, frozenset({7, 100})), script, batch_size=10, worker_type="thread")
    for _ in range(epochs):
        assert labels_of(loader) == list(range(300))


@settings(max_examples=examples(10), deadline=None)
@given(script=scripts, cancelled_after=st.integers(1, 20))
def test_order_and_samples_are_exact_with_persistent_workers_and_cancelled_epochs(script, cancelled_after) -> None:
    loader = scripted(Uneven(300, frozenset()), script, batch_size=10, persistent_workers=True)
    for _ in range(3):
        for _ in zip(range(cancelled_after), loader, strict=False):
            pass
        assert labels_of(loader) == list(range(300))
    del loader._iterator


def test_batches_kept_survive_changes() -> None:
    loader = scripted(Numbered(400), [2, 4, 1, 3], batch_size=8)
    kept = list(loader)
    assert all(torch.equal(images.flatten(1)[:, 0], numbers.float()) for images, numbers in kept)
    assert [int(n) for _, numbers in kept for n in numbers] == list(range(400))


class Timed(AutoWorkers):
    """The policy, with timings that are scripted instead of measured: what batch k takes to make, and the step."""

    def __init__(self, *, step_ms: float, work_ms: Callable[[int], float], workers: int) -> None:
        super().__init__(workers=workers, most=4)
        self.step_ns, self.work_ms, self.number = int(step_ms * 1e6), work_ms, 0

    def observe(self, timing: BatchTiming) -> int:
        self.number += 1
        work_ns = int(self.work_ms(self.number) * 1e6)
        wait_ns = max(0, work_ns // self.workers - self.step_ns)
        return super().observe(
            BatchTiming(step_ns=self.step_ns, handling_ns=200_000, wait_ns=wait_ns, work_ns=work_ns, busy_ns=work_ns)
        )


def retired_of(pool: Pool) -> list[BaseProcess]:
    return [*pool._retiring.values()] if isinstance(pool, ProcessPool) else []


def workers_by_batch(loader: DataLoader) -> list[int]:
    """Return how many workers there were at each batch; before the next, new ones are ready and retired ones ended.

    For the policy's times are scripted: in the time that a process takes to end, a hundred batches are handed out here.
    """
    batches = iter(loader)
    pool, workers, labels = batches.pipeline.scheduler.pool, [], []
    for _, numbers in batches:
        labels += numbers.tolist()
        while not all(pool.is_ready(worker) for worker in range(pool.size)):
            time.sleep(0.001)
        for process in retired_of(pool):
            process.join()
        workers.append(loader.statistics().workers)
    assert labels == list(range(800))
    return workers


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_a_cost_that_changes_in_the_middle_is_followed_within_a_second(worker_type, monkeypatch) -> None:
    pretend_cores(monkeypatch, 4)
    loader = DataLoader(Numbered(800), batch_size=10, num_workers="auto", worker_type=worker_type, dispatch="demand")
    # 40 ms a batch, then 240 ms; a step of 80 ms needs one worker, then three, which a look after 0.5 s shows.
    runtime_of(loader).auto_workers = Timed(step_ms=80, work_ms=lambda batch: 40 if batch < 40 else 240, workers=2)
    workers = workers_by_batch(loader)
    assert max(workers[30:40]) <= 2
    assert workers[60] >= 3
    assert "the step waited" in loader.statistics().workers_reason


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_workers_that_sleep_may_be_more_than_the_cores(worker_type, monkeypatch) -> None:
    pretend_cores(monkeypatch, 2)
    monkeypatch.setattr("penstock.loader.dataloader.MOST_WAITING_WORKERS", 5)
    loader = DataLoader(
        Numbered(160, delay_s=0.005), batch_size=4, num_workers="auto", worker_type=worker_type, dispatch="demand"
    )
    labels, workers = [], 0
    for _, numbers in loader:
        labels += numbers.tolist()
        workers = max(workers, loader.statistics().workers)
    assert labels == list(range(160))
    assert 2 < workers <= 5


def test_there_may_be_as_many_that_sleep_as_the_tuner_tries(monkeypatch) -> None:
    pretend_cores(monkeypatch, 2)
    auto = runtime_of(DataLoader(Numbered(8), num_workers="auto")).auto_workers
    assert auto is not None
    assert auto.most_waiting == search._MOST_WORKERS


def test_workers_that_are_no_longer_needed_go() -> None:
    loader = DataLoader(Numbered(800), batch_size=10, num_workers="auto", dispatch="demand")
    runtime_of(loader).auto_workers = Timed(step_ms=40, work_ms=lambda batch: 120 if batch < 30 else 4, workers=3)
    workers = workers_by_batch(loader)
    assert workers[29] == 3
    assert workers[-1] == 1


def test_where_samples_may_depend_on_their_worker_the_batches_are_torchs_for_the_same_number(monkeypatch) -> None:
    pretend_cores(monkeypatch, 4)
    compute_first_batch(monkeypatch)
    for dataset, numbers in ((Augmented(90), {3, 4}), (Aware(90), {3})):
        loader = DataLoader(dataset, batch_size=8, num_workers="auto", generator=torch.Generator().manual_seed(3))
        own = [repr(batch) for batch in loader]
        statistics = loader.statistics()
        assert statistics.workers in numbers
        workers = statistics.workers
        theirs = TorchDataLoader(dataset, batch_size=8, num_workers=workers, generator=torch.Generator().manual_seed(3))
        assert own == [repr(batch) for batch in theirs]
        assert "samples may depend on their worker" in statistics.workers_reason


def test_where_samples_may_depend_on_their_worker_the_number_changes_between_epochs(monkeypatch) -> None:
    pretend_cores(monkeypatch, 4)
    compute_first_batch(monkeypatch)
    choices = iter([3, 1])
    monkeypatch.setattr(AutoWorkers, "choose", lambda auto, is_fixed: next(choices))
    loader = DataLoader(Augmented(400), batch_size=8, num_workers="auto")
    seen = []
    for _ in range(2):
        numbers = set()
        for _ in loader:
            numbers.add(loader.statistics().workers)
        seen.append(numbers)
    assert seen in ([{3}, {1}], [{4}, {1}])


def test_an_iterable_dataset_keeps_its_number_and_says_why() -> None:
    loader = DataLoader(Stream(100), batch_size=10, num_workers="auto")
    assert sorted(int(i) for _, numbers in loader for i in numbers) == list(range(100))
    assert "iterable" in loader.statistics().workers_reason
    assert loader.statistics().workers == loader.num_workers


def test_a_loader_of_a_script_can_be_made_auto_and_keeps_its_batches() -> None:
    order = list(range(200))
    random.Random(5).shuffle(order)
    for asked in (0, 1, 3):
        loader = DataLoader(Numbered(200), batch_size=8, sampler=order, num_workers=asked)
        enable_autoscaling(loader)
        assert labels_of(loader) == order
        assert loader.statistics().workers_reason.startswith("auto")


def test_a_single_core_gets_no_workers(monkeypatch) -> None:
    pretend_cores(monkeypatch, 1)
    loader = DataLoader(Numbered(20), batch_size=4, num_workers="auto")
    assert loader.num_workers == 0
    assert labels_of(loader) == list(range(20))


def test_two_loops_over_one_loader_do_not_disturb_each_other(monkeypatch) -> None:
    pretend_cores(monkeypatch, 4)
    loader = scripted(Numbered(300), [2, 4, 1], batch_size=10)
    pairs = [(one.tolist(), other.tolist()) for (_, one), (_, other) in zip(loader, loader, strict=True)]
    assert all(one == other for one, other in pairs)
    assert [label for one, _ in pairs for label in one] == list(range(300))


def test_workers_of_another_start_method_come_and_go_too() -> None:
    loader = scripted(Numbered(400), [1, 1, 3, 3, 2], batch_size=8, multiprocessing_context="forkserver")
    assert labels_of(loader) == list(range(400))


class Wanting(Scripted):
    """Wants ever more, unless it is told that there are no more to be had."""

    def __init__(self) -> None:
        super().__init__([2])

    def observe(self, timing: BatchTiming) -> int:
        self.workers = min(self.most, self.workers + 1)
        return self.workers


def test_a_system_that_starts_no_more_workers_is_no_error(monkeypatch) -> None:
    spawn = ProcessPool._spawn

    def refuse(pool: ProcessPool, worker: int, shards: dict[int, StreamShard]) -> BaseProcess:
        if worker >= 3:
            raise WorkerStartError("no more processes")
        return spawn(pool, worker, shards)

    monkeypatch.setattr(ProcessPool, "_spawn", refuse)
    loader = scripted(Numbered(300, delay_s=0.003), [2], batch_size=4)
    runtime_of(loader).auto_workers = Wanting()
    assert labels_of(loader) == list(range(300))
    statistics = loader.statistics()
    assert (statistics.workers, statistics.workers_reason) == (3, "auto: the system starts no more")


def test_no_worker_is_started_when_memory_runs_out(monkeypatch) -> None:
    monkeypatch.setattr("penstock.loader.scheduling.scaling_pool.available_nbytes", lambda: 100 << 20)
    loader = scripted(Numbered(300), [2], batch_size=4)
    runtime_of(loader).auto_workers = Wanting()
    assert labels_of(loader) == list(range(300))
    statistics = loader.statistics()
    assert (statistics.workers, statistics.workers_reason) == (2, "auto: there is no memory left for more")


@pytest.mark.parametrize("options", [{}, {"timeout": 30}, {"worker_init_fn": lambda worker: None}])
def test_the_training_process_takes_over_between_two_epochs_where_nothing_was_asked_of_workers(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 2)
    monkeypatch.setattr(AutoWorkers, "why_no_workers", lambda auto: "cheap" if auto._seen.batches else "")
    loader = DataLoader(Numbered(40, (2,)), 2, shuffle=True, num_workers="auto", **options)
    loaders = loader, TorchDataLoader(Numbered(40, (2,)), 2, shuffle=True, num_workers=1)
    for epoch in range(3):
        orders = []
        for one in loaders:
            torch.manual_seed(epoch)
            orders.append([labels.tolist() for _, labels in one])
        assert orders[0] == orders[1]
        leaves = epoch > 0 and not options
        assert (loader.statistics().workers == 0) is leaves
        assert (loader.statistics().workers_reason == "auto: cheap") is leaves


class Leaving(Numbered):
    """Leaves something in the process that makes its samples."""

    def __init__(self, what: str) -> None:
        super().__init__(40, (2,))
        self.what, self.made = what, 0
        self.kept: list[Any] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.what == "an open file" and not self.kept:
            self.kept.append(os.open(__file__, os.O_RDONLY))  # for the next samples
        elif self.what == "a thread" and not self.kept:
            self.kept.append(threading.Thread(target=threading.Event().wait, daemon=True))
            self.kept[0].start()
        elif self.what == "a count":
            self.made += 1
        elif self.what == "a question who makes them":
            assert get_worker_info().id < 2
        elif self.what == "another random state":
            torch.rand(())
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "what", ["nothing", "an open file", "a thread", "a count", "a question who makes them", "another random state"]
)
@pytest.mark.parametrize("nest", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(40))])
def test_workers_stay_where_samples_leave_something_in_the_process_that_makes_them(
    what: str, nest: Callable[[Leaving], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 2)
    monkeypatch.setattr(
        AutoWorkers, "why_no_workers", lambda auto: "" if auto.must_stay or not auto._seen.batches else "cheap"
    )
    loader = DataLoader(nest(Leaving(what)), 2, shuffle=True, num_workers="auto")
    for _ in range(2):
        assert sorted(labels_of(loader)) == list(range(40))
    assert (loader.statistics().workers == 0) is (what == "nothing")


@pytest.mark.parametrize(
    ("dataset", "arguments", "is_watched"),
    [
        (Numbered(40), {}, True),
        (Numbered(40), {"seed": 1}, True),
        (TensorDataset(torch.arange(40)), {}, False),
        (TensorDataset(torch.arange(40)), {"dispatch": "round_robin"}, True),
    ],
)
def test_samples_are_watched_where_they_might_leave_something(
    dataset: Any, arguments: dict[str, Any], is_watched: bool
) -> None:
    loader = DataLoader(dataset, 2, num_workers=2, **arguments)
    runtime_of(loader).auto_workers = AutoWorkers(workers=2, most=2)
    assert iter(loader).pipeline.scheduler.pool._options.is_watched is is_watched


class Drawing:
    """Draws a whole epoch's batches from the global random state when it is asked for an iterator."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(40).view(20, 2).tolist())


def test_the_order_of_a_sampler_that_draws_when_it_is_asked_for_an_iterator_stays_that_with_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cores(monkeypatch, 2)
    monkeypatch.setattr(AutoWorkers, "why_no_workers", lambda auto: "cheap")
    orders = []
    for kind, workers in ((DataLoader, "auto"), (TorchDataLoader, 1)):
        torch.manual_seed(0)
        loader = kind(Numbered(40, (2,)), batch_sampler=Drawing(), num_workers=workers)
        orders.append([labels.tolist() for _ in range(3) for _, labels in loader])
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("rows", "options", "gathers"),
    [
        (torch.zeros(64, 3), {}, True),
        (torch.zeros(64, 1 << 18), {}, False),  # 16 MiB for a batch, which a worker may hide behind a step
        (torch.zeros(64, 3), {"persistent_workers": True}, False),
        (torch.zeros(64, 3), {"timeout": 30}, False),
        (torch.zeros(64, 3), {"multiprocessing_context": "fork"}, False),
        (torch.zeros(64, 3), {"worker_init_fn": lambda worker: None}, False),
        (torch.zeros(64, 3), {"collate_fn": lambda samples: torch.stack([row for (row,) in samples])}, False),
    ],
)
def test_batches_that_are_one_gather_in_memory_have_no_workers_from_the_start(
    rows: torch.Tensor, options: dict[str, object], gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 2)
    loader = DataLoader(TensorDataset(rows), 16, num_workers="auto", **options)
    assert (loader.num_workers == 0) is gathers
    assert ("gathered in memory" in loader.statistics().workers_reason) is gathers
    assert sum(1 for _ in loader) == 4
    if options.get("persistent_workers"):
        loader._iterator = None


@pytest.mark.parametrize("indices", [np.arange(8), torch.arange(8, dtype=torch.int32), [-1, 3], [*np.arange(8)]])
def test_a_subset_by_indices_that_cannot_be_gathered_has_its_samples_with_auto(
    indices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 2)
    dataset = Subset(TensorDataset(torch.arange(40)), indices)
    found, wanted = (list(DataLoader(dataset, 3, num_workers=workers)) for workers in ("auto", 0))
    assert str(found) == str(wanted)


def test_an_empty_dataset_has_no_batches_with_auto() -> None:
    assert list(DataLoader(TensorDataset(torch.zeros(0, 3)), 16, num_workers="auto")) == []
