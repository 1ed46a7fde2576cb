"""What programs do with batches on GPUs, on the stand-in of this folder (`make standin`): no byte is ever wrong."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import scatter_gather
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, infer
from penstock.device import device_of
from penstock.device.accelerator import Accelerator

pytestmark = [pytest.mark.standin, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

TEN_MS = 20_000_000
"""Cycles of `torch.cuda._sleep`."""

ROWS = 8
WAYS = [{"device": "cuda:0"}, {"pin_memory": True}]


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is full of i."""

    def __init__(self, batches: int, length: int = 1 << 13, failing: int = -1) -> None:
        self.samples, self.length, self.failing = ROWS * batches, length, failing

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.failing:
            raise ValueError("a sample that cannot be read")
        return torch.full((self.length,), float(index))


def wrong(batches: list[torch.Tensor]) -> list[int]:
    """Return which of a whole pass's batches do not hold their numbers."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    first, found = 0, []
    for number, batch in enumerate(batches):
        expected = torch.arange(first, first + len(batch), dtype=torch.float32)[:, None]
        found += [number] * bool((batch.cpu() != expected).any())  # a copy first: kernels compute nothing here
        first += len(batch)
    return found


def copied(batch: torch.Tensor, to: str = "cuda:0") -> torch.Tensor:
    """Return the batch on a GPU, read there after 10 ms of other work."""
    there = batch.to(to, non_blocking=True)
    with torch.cuda.device(to):
        torch.cuda._sleep(TEN_MS)
        return there.clone()


def in_threads(*bodies: Callable[[], object]) -> None:
    """Run them all, and raise what one raised."""
    errors: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
        torch.cuda.set_stream(torch.cuda.default_stream(index))
    torch.cuda.set_device(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_two_gpus_by_turns(workers: int) -> None:
    loaders = [DataLoader(Numbered, batch_size=ROWS, num_workers=workers, device=f"cuda:{i}") for i in (0, 1)]
    read: list[list[torch.Tensor]] = [[], []]
    for batches in zip(*loaders, strict=True):
        for index, batch in enumerate(batches):
            read[index].append(copied(batch, f"cuda:{index}"))
        del batch, batches
    assert [wrong(each) for each in read] == [[], []]


Numbered = Numbers(40)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_parts_that_data_parallel_scatters(options: dict[str, Any], workers: int) -> None:
    halves: list[torch.Tensor] = []
    for batch in DataLoader(Numbers(60), batch_size=ROWS, num_workers=workers, **options):
        for index in (0, 1):
            with torch.cuda.device(index):
                torch.cuda._sleep(TEN_MS // 2)
        parts = scatter_gather.scatter(batch, [0, 1])
        del batch
        halves += parts
        del parts
    assert wrong(halves) == []


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_threads_with_streams_of_their_own(options: dict[str, Any]) -> None:
    def iterate() -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        read = [copied(batch) for batch in DataLoader(Numbered, batch_size=ROWS, **options)]
        torch.cuda.current_stream().synchronize()
        assert wrong(read) == []

    in_threads(iterate, iterate, iterate)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_an_iterator_that_is_handed_between_threads(options: dict[str, Any]) -> None:
    batches = iter(DataLoader(Numbered, batch_size=ROWS, num_workers=2, **options))
    read: list[torch.Tensor] = []

    def some() -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        read.extend(copied(batch) for batch in itertools.islice(batches, 5))

    for _ in range(8):
        in_threads(some)
    assert len(read) == 40
    assert wrong(read) == []


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_capture_while_a_loader_ends_in_another_thread(options: dict[str, Any], workers: int, mode: str) -> None:
    """Its slots are released, its iterator is dropped, and another one begins."""
    began, value = threading.Event(), torch.zeros(8, device="cuda")
    ended = threading.Event()

    kept: list[torch.Tensor] = []

    def iterate() -> None:
        try:
            batches = iter(DataLoader(Numbered, batch_size=ROWS, num_workers=workers, **options))
            early = [next(batches).to("cuda", non_blocking=True) for _ in range(3)]
            began.wait()
            del batches, early
            gc.collect()
            for batch in DataLoader(Numbered, batch_size=ROWS, num_workers=workers, **options):
                kept.append(batch.to("cuda", non_blocking=True).clone())
                del batch
        finally:
            ended.set()

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            value.zero_()
            began.set()
            ended.wait()
        graph.replay()

    in_threads(iterate, capture)
    assert wrong(kept) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_current_stream_that_changes_and_comes_back(options: dict[str, Any], workers: int) -> None:
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    batches = iter(DataLoader(Numbers(90), batch_size=ROWS, num_workers=workers, **options))
    read: list[torch.Tensor] = []
    while True:
        with torch.cuda.stream(streams[len(read) * len(read) % 3]):
            batch = next(batches, None)
            if batch is None:
                break
            read.append(copied(batch))
            del batch
    assert wrong(read) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_whose_slots_cannot_be_page_locked(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_of("cuda"), "register", lambda memory: None)
    loader = DataLoader(Numbers(60), batch_size=ROWS, num_workers=workers, device="cuda")
    assert wrong([copied(batch) for batch in loader]) == []
    assert loader.statistics().ring.pinned_nbytes == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_another_stream_reads_with_record_stream(workers: int) -> None:
    side, read = torch.cuda.Stream(), []
    for batch in DataLoader(Numbers(80), batch_size=ROWS, num_workers=workers, device="cuda"):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(TEN_MS)
            read.append(batch.clone())
        batch.record_stream(side)
        del batch
    assert wrong(read) == []


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_passes_that_are_left_with_copies_in_flight(options: dict[str, Any], persistent: bool) -> None:
    loader = DataLoader(Numbers(30), batch_size=ROWS, num_workers=2, persistent_workers=persistent, **options)
    read: list[list[torch.Tensor]] = []
    for leave in (3, 1, 7, 30):
        torch.cuda._sleep(2 * TEN_MS)
        read.append([])
        for batch in loader:
            read[-1].append(batch.to("cuda", non_blocking=True).clone())
            del batch
            if len(read[-1]) == leave:
                break
    assert [wrong(each) for each in read] == [[], [], [], []]


@pytest.mark.parametrize("where", ["loop", "dataset"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_an_exception_with_copies_in_flight(options: dict[str, Any], where: str) -> None:
    read: list[torch.Tensor] = []

    def train() -> None:
        data = Numbers(20, failing=ROWS * 5 if where == "dataset" else -1)
        for batch in DataLoader(data, batch_size=ROWS, num_workers=2, **options):
            torch.cuda._sleep(TEN_MS)
            read.append(batch.to("cuda", non_blocking=True))
            if where == "loop" and len(read) == 5:
                raise ValueError("a step that fails")

    with pytest.raises(ValueError, match=r"a step that fails|a sample that cannot be read"):
        train()
    after = [copied(batch) for batch in DataLoader(Numbered, batch_size=ROWS, num_workers=2, **options)]
    assert wrong(read) == wrong(after) == []


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_two_loaders_with_workers_that_stay_by_turns(options: dict[str, Any]) -> None:
    train, test = (
        DataLoader(Numbers(batches), batch_size=ROWS, num_workers=2, persistent_workers=True, **options)
        for batches in (30, 12)
    )
    for _ in range(3):
        assert wrong([copied(batch, "cuda:1") for batch in train]) == []
        assert wrong([copied(batch) for batch in test]) == []


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_outputs_of_infer_from_two_gpus_are_whole(device: str) -> None:
    """The first half of a model lies on one GPU, the second on the other, and both give results."""

    def model(batch: torch.Tensor) -> dict[str, Any]:
        found = {"own": batch.clone()}
        for index in (0, 1):
            with torch.cuda.device(index):
                there = batch.to(f"cuda:{index}")
                late = torch.zeros_like(there)
                torch.cuda._sleep(TEN_MS)
                found[str(index)] = late.copy_(there)
        return {**found, "host": torch.ones(3), "number": 5}

    batches = (torch.full((ROWS, 1 << 14), float(number)) for number in range(40))
    for number, output in enumerate(infer(model, batches, device=device)):
        assert {name: bool((output[name] == number).all()) for name in ("own", "0", "1")} == {
            "own": True, "0": True, "1": True
        }  # fmt: skip
        assert output["host"].tolist() == [1, 1, 1]
        assert output["number"] == 5


def test_outputs_of_infer_on_another_gpu_than_the_current_one() -> None:
    torch.cuda.set_device(1)
    batches = (torch.full((ROWS, 1 << 14), float(number)) for number in range(40))
    outputs = infer(torch.Tensor.clone, batches, device="cuda:0")
    assert [int(output[0, 0]) for output in outputs if bool((output == output[0, 0]).all())] == list(range(40))


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_batches_are_torchs_when_the_current_gpu_changes_in_the_loop(options: dict[str, Any]) -> None:
    read = []
    for number, batch in enumerate(DataLoader(Numbers(60), batch_size=ROWS, num_workers=2, **options)):
        torch.cuda.set_device(number % 2)
        read.append(copied(batch, f"cuda:{number % 2}"))
        del batch
    assert wrong(read) == []
    theirs = list(TorchDataLoader(Numbers(60), batch_size=ROWS))
    assert all(torch.equal(ours.cpu(), batch) for ours, batch in zip(read, theirs, strict=True))


@pytest.mark.parametrize("worker_type", ["process", "thread"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_gpu_used_as_any_other_accelerator_of_torch(index: int, worker_type: Any) -> None:
    """By what torch offers for all of them: no fences, and slots that cannot be page-locked."""
    device, streams = Accelerator(torch.device("cuda", index)), [torch.cuda.Stream(index) for _ in range(3)]
    batches = iter(DataLoader(Numbers(60), batch_size=ROWS, num_workers=2, device=device, worker_type=worker_type))
    read: list[torch.Tensor] = []
    while True:
        with torch.cuda.stream(streams[len(read) % 3]):
            batch = next(batches, None)
            if batch is None:
                break
            torch.cuda._sleep(TEN_MS)
            read.append(batch.clone())
            del batch
    assert wrong(read) == []
    numbers = (torch.full((ROWS, 1 << 14), float(number)) for number in range(30))
    outputs = infer(torch.Tensor.clone, numbers, device=device)
    assert [number for number, output in enumerate(outputs) if bool((output != number).any())] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_gpu_writes_into_a_batch_reaches_no_later_one(workers: int) -> None:
    results = torch.full((ROWS, 1 << 13), -1.0).to("cuda")
    for number, batch in enumerate(DataLoader(Numbers(80), batch_size=ROWS, num_workers=workers, pin_memory=True)):
        first = number * ROWS
        assert bool((batch == torch.arange(first, first + ROWS, dtype=torch.float32)[:, None]).all())
        torch.cuda._sleep(TEN_MS)
        batch.copy_(results, non_blocking=True)
        del batch


@pytest.mark.parametrize("workers", [0, 2])
def test_outputs_of_a_function_that_takes_batches_to_a_gpu_itself_are_whole(workers: int) -> None:
    def later(batch: torch.Tensor) -> torch.Tensor:
        there = batch.to("cuda:0", non_blocking=True)
        torch.cuda._sleep(TEN_MS // 4)
        return there

    copies: list[torch.Tensor] = []

    def keep(output: torch.Tensor) -> None:  # in a thread, whose current stream is another one
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(TEN_MS // 4)
            copies.append(output.to("cuda:1", non_blocking=True))

    loader = DataLoader(Numbers(20), batch_size=ROWS, num_workers=workers, pin_memory=True)
    for output in infer(later, loader):
        in_threads(lambda output=output: keep(output))  # type: ignore[misc]
        assert output.is_cpu
    assert wrong(copies) == []
