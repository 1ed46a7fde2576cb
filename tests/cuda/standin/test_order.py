"""Order, lifetimes and captures under torch's own CUDA build, on the stand-in of this folder (`make standin`)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock import DataLoader, infer
from penstock.device import device_of

pytestmark = [pytest.mark.standin, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

TEN_MS = 20_000_000
"""Cycles of `torch.cuda._sleep`."""


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is full of i; with `grow`, later samples are larger."""

    def __init__(self, samples: int, length: int = 1 << 12, *, grow: bool = False) -> None:
        self.samples, self.length, self.grow = samples, length, grow

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.length * (1 + index // 8 * self.grow),), float(index))


def wrong(batches: list[torch.Tensor]) -> list[int]:
    """Return which of batches of eight samples do not hold their numbers."""
    torch.cuda.synchronize()
    found = []
    for number, batch in enumerate(batches):
        expected = torch.arange(8 * number, 8 * number + 8.0)[:, None]
        if (batch.cpu() != expected).any():
            found.append(number)
    return found


@pytest.fixture(autouse=True)
def _default_stream() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_slots_are_not_reused_before_copies_to_any_gpu_are_over(index: int, workers: int) -> None:
    there = torch.device("cuda", index)
    arrived = []
    for number, batch in enumerate(DataLoader(Numbers(1600), batch_size=8, num_workers=workers, pin_memory=True)):
        if number % 8 == 0:
            with torch.cuda.device(there):
                torch.cuda._sleep(TEN_MS)
        arrived.append(batch.to(there, non_blocking=True))
        del batch
    torch.cuda.synchronize(there)
    assert wrong(arrived) == []


def test_outputs_of_infer_may_be_copied_back_and_dropped() -> None:
    side = torch.cuda.Stream()
    arrived = []
    batches = (torch.full((1 << 16,), float(number)) for number in range(60))
    for number, output in enumerate(infer(lambda x: x.clone(), batches, device="cuda")):
        assert (output == number).all()
        with torch.cuda.stream(side):
            if number % 4 == 0:
                torch.cuda._sleep(2 * TEN_MS)
            arrived.append(output.to("cuda", non_blocking=True))
        del output
    torch.cuda.synchronize()
    assert all(bool((batch.cpu() == number).all()) for number, batch in enumerate(arrived))


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"pin_memory": True}], ids=str)
def test_a_batch_may_be_used_on_another_stream_than_the_one_before(options: dict[str, Any]) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    batches = iter(DataLoader(Numbers(800, 1 << 15), batch_size=8, **options))
    read: list[torch.Tensor] = []
    while True:
        torch.cuda.set_stream(streams[len(read) % 2])
        batch = next(batches, None)
        if batch is None:
            break
        batch = batch.to("cuda", non_blocking=True)
        torch.cuda._sleep(TEN_MS)
        read.append(batch.clone())
        del batch
    assert wrong(read) == []


def test_threads_keep_their_own_streams() -> None:
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    left: list[int] = []

    def iterate() -> None:
        own = torch.cuda.Stream()
        torch.cuda.set_stream(own)
        for _ in range(4):
            for number, _ in enumerate(DataLoader(torch.arange(4096.0).view(-1, 8), batch_size=16, device="cuda")):
                if torch.cuda.current_stream() != own:
                    left.append(number)
                    torch.cuda.set_stream(own)

    threads = [threading.Thread(target=iterate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switch_interval)
    assert left == []


def test_no_stream_of_torchs_pool_is_taken() -> None:
    device: Any = device_of("cuda")
    pool = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    for stream in (device._up, device._down, device._outside):
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream().cuda_stream not in pool


# ── captures ────────────────────────────────────────────────────────────────────────────────────────────────


def captured(body: Callable[[], object], mode: str = "global") -> None:
    """Capture a graph around `body`; raises if that broke the capture."""
    value = torch.zeros(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
        value.zero_()
        body()


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"pin_memory": True}], ids=str)
def test_a_capture_survives_what_a_loader_does_in_its_thread(options: dict[str, Any], grow: bool) -> None:
    loader = DataLoader(Numbers(400, 1024, grow=grow), batch_size=8, **options)
    held = [iter(loader)]
    next(held[0])
    captured(lambda: [next(held[0]) for _ in range(6)])
    captured(held.clear)


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"pin_memory": True}], ids=str)
def test_a_capture_survives_a_loader_in_another_thread_as_it_survives_torchs(
    options: dict[str, Any], mode: str
) -> None:
    errors: list[Exception] = []

    def iterate() -> None:
        try:
            for batch in DataLoader(Numbers(80), batch_size=8, **options):
                batch.to("cuda", non_blocking=True)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    def beside() -> None:
        thread = threading.Thread(target=iterate)
        thread.start()
        thread.join()

    captured(beside, mode)
    assert errors == []
