"""DataLoader with device= and pin_memory, on the simulated device: the batches of a loader without them."""

from __future__ import annotations

import gc
import subprocess
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from capture_elsewhere import captured_elsewhere
from sample_sets import Nested, Numbered, Raising
from scripts import run

from penstock import DataLoader, OptionError, Sim
from penstock.core.tree import map_leaves, tensors


def slow(*, has_fence: bool = True) -> Sim:
    return Sim(bandwidth=2e8, delay_s=3e-4, has_fence=has_fence)


def labels(loader: DataLoader[Any]) -> list[int]:
    seen = []
    for images, numbers in loader:
        assert torch.equal(images[:, 0, 0, 0], numbers.float())
        seen += numbers.tolist()
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", ["cpu", "sim", slow()], ids=["cpu", "sim", "slow sim"])
def test_batches_arrive_whole_and_in_order(device: Any, workers: int) -> None:
    loader = DataLoader(Numbered(120), batch_size=8, num_workers=workers, device=device)
    for _ in range(2):
        assert labels(loader) == list(range(120))
    statistics = loader.statistics()
    assert statistics.uploads == (0 if device == "cpu" else 30)
    assert statistics.ring.pinned_nbytes > 0 or device == "cpu"


@pytest.mark.parametrize("workers", [0, 2])
def test_nested_batches_and_what_is_no_tensor_arrive_too(workers: int) -> None:
    def plain(device: str | None) -> list[Any]:
        loader = DataLoader(Nested(12), batch_size=4, num_workers=workers, device=device)
        return [map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, x) for x in loader]

    assert plain("sim") == plain(None)


class Growing(torch.utils.data.Dataset[dict[str, Any]]):
    """Sample i is full of i, and of -i in a container that is collated at the end; each eight are larger, to a size."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> dict[str, Any]:
        values = torch.full((1024 * (1 + index // 8 % 5),), float(index))
        return {"rows": values, "others": OrderedDict(x=-values)}


@pytest.mark.parametrize("worker_type", ["process", "thread"])
@pytest.mark.parametrize("device", [None, "sim"])
def test_batches_of_growing_samples_are_whole_and_page_locked_as_far_as_they_go(
    device: str | None, worker_type: Any
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "worker_type": worker_type, "dispatch": "demand"}
    loader = DataLoader(Growing(), batch_size=8, device=device, **options)
    for number, batch in enumerate(loader):
        expected = torch.arange(8.0 * number, 8.0 * number + 8)[:, None]
        assert (batch["rows"] == expected).all()
        assert (batch["others"]["x"] == -expected).all()
        del batch


def test_how_long_the_device_waited_for_copies_is_timed_in_one_step_of_64() -> None:
    loader = DataLoader(Numbered(600), batch_size=4, device=Sim(delay_s=5e-3))  # nothing hides the copies
    for number, _ in enumerate(loader):
        if number == 8:
            assert loader.statistics().copy_wait_s is None
    waited_s = loader.statistics().copy_wait_s
    assert waited_s is not None
    assert waited_s > 0


@pytest.mark.parametrize("device", [None, "sim"])
@pytest.mark.parametrize("workers", [0, 2])
def test_slots_come_back_from_passes_that_are_left(workers: int, device: str | None) -> None:
    loader = DataLoader(Numbered(400, (3, 64, 64)), batch_size=4, num_workers=workers, device=device)
    for _ in range(3):
        for number, _ in enumerate(loader):
            if number == 7:
                break
    assert labels(loader) == list(range(400))
    counts = loader.statistics().ring
    assert counts.filling == counts.ready == 0


def test_kept_batches_stay_right() -> None:
    kept = list(DataLoader(Numbered(80), batch_size=4, num_workers=2, device=slow()))
    assert [int(i) for _, numbers in kept for i in numbers] == list(range(80))
    assert all(torch.equal(images[:, 1, 3, 3], numbers.float()) for images, numbers in kept)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_broken_off_epoch_leaves_the_next_one_whole(persistent: bool) -> None:
    loader = DataLoader(Numbered(90), batch_size=6, num_workers=2, device=slow(), persistent_workers=persistent)
    for _ in range(3):
        next(iter(loader))
    assert labels(loader) == list(range(90))


def test_two_iterators_of_one_loader_live_side_by_side() -> None:
    loader = DataLoader(Numbered(40), batch_size=4, num_workers=2, device=slow())
    for (one, _), (other, _) in zip(loader, loader, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_where_its_batch_would_have(workers: int) -> None:
    batches = iter(DataLoader(Raising(40), batch_size=2, num_workers=workers, device="sim"))
    next(batches)
    with pytest.raises(OSError, match="sample 3 is corrupt"):
        next(batches)


def test_a_device_without_arena_says_so() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        list(DataLoader(Numbered(40), batch_size=20, num_workers=2, device=Sim(capacity_nbytes=10_000)))


class Bag:
    """A batch with a `to` of its own."""

    def __init__(self, samples: list[Any]) -> None:
        self.images = torch.stack([image for image, _ in samples])
        self.moved_to: Any = None

    def to(self, device: Any, non_blocking: bool = False) -> Bag:
        moved = Bag.__new__(Bag)
        moved.images, moved.moved_to = self.images.clone(), device
        return moved


@pytest.mark.parametrize("workers", [0, 2])
def test_a_custom_batch_is_moved_by_its_own_method(workers: int) -> None:
    sim = slow()
    batches = list(DataLoader(Numbered(12), batch_size=4, num_workers=workers, collate_fn=Bag, device=sim))
    assert all(batch.moved_to == sim.torch_device for batch in batches)
    assert torch.cat([batch.images[:, 0, 0, 0] for batch in batches]).tolist() == list(range(12))


@dataclass
class Kept:
    """A batch that is on no device."""

    images: torch.Tensor
    array: np.ndarray


def kept(samples: list[Any]) -> dict[str, Any]:
    images = torch.stack([image for image, _ in samples])
    return {"own": Kept(images, images.numpy() + 1), "images": images, "array": images.numpy() + 2, "name": "x"}


@pytest.mark.parametrize("has_fence", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_stays_on_the_host_is_not_overwritten_before_the_users_own_copies_are_over(
    workers: int, has_fence: bool
) -> None:
    sim = slow(has_fence=has_fence)
    side = sim.stream()
    loader = DataLoader(Numbered(120), batch_size=4, num_workers=workers, collate_fn=kept, device=sim)
    copied: list[list[torch.Tensor]] = [[], [], []]
    for batch in loader:
        parts = batch["own"].images, torch.from_numpy(batch["own"].array), torch.from_numpy(batch["array"])
        for images, found in zip(parts, copied, strict=True):
            found.append(sim.to(images, side))
        del batch, parts, images
    sim.synchronize()
    for more, found in enumerate(copied):
        assert torch.cat(found)[:, 0, 0, 0].tolist() == [number + more for number in range(120)]


def test_a_device_that_cannot_pin_is_fed_from_pageable_memory() -> None:
    sim = Sim(pinnable_nbytes=0)
    loader = DataLoader(Numbered(60), batch_size=4, num_workers=2, device=sim)
    assert labels(loader) == list(range(60))
    assert loader.statistics().ring.pinned_nbytes == 0
    assert loader.statistics().pinning == "a copy in torch's pinned memory, because sim cannot page-lock slots"
    assert sim.counts["staged"] == sim.counts["copies"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_slots_are_not_used_again_before_the_users_own_copies_are_over(workers: int) -> None:
    sim = slow()
    side = sim.stream()
    loader = DataLoader(Numbered(200), batch_size=4, num_workers=workers, pin_memory=sim)
    copied = [sim.to(images, side) for images, _ in loader]
    sim.synchronize()
    assert torch.cat(copied)[:, 0, 0, 0].tolist() == list(range(200))
    assert sim.counts["staged"] == 0
    assert sim.counts["fences"] > 0
    assert loader.statistics().pinning == "slots, fenced by sim"


def test_a_device_that_is_not_here_is_one_clear_error() -> None:
    with pytest.raises(OptionError, match="device='nonsense' is not a device"):
        DataLoader(Numbered(4), device="nonsense")


def test_tensors_are_found_in_any_structure() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list(map(len, tensors({"a": [one, ("words", two)], "b": {"c": three}}))) == [1, 2, 3]


def test_a_worker_process_never_imports_the_device_package() -> None:
    done: subprocess.CompletedProcess[str] = run(
        """
        if __name__ == "__main__":
            from sample_sets import Imported
            from penstock import DataLoader
            for method in ("fork", "forkserver", "spawn"):
                print(*DataLoader(Imported(), num_workers=1, multiprocessing_context=method, batch_size=None))
        """
    )
    # A fork has what its parent had; it imports nothing.
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole_while_a_graph_is_captured(workers: int) -> None:
    device = slow()
    loader = DataLoader(Numbered(64), batch_size=4, num_workers=workers, device=device)
    seen = []
    for number, (images, numbers) in enumerate(loader):
        device.capturing = number % 3 == 0  # for the next batch
        assert torch.equal(images[:, 0, 0, 0], numbers.float())
        seen += numbers.tolist()
    device.capturing = False
    assert seen == list(range(64))


def test_a_call_into_a_capture_is_refused_by_the_simulated_device() -> None:
    device = Sim()
    device.capturing = True
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        device.record_event()
    with device.outside_capture():
        device.record_event().synchronize()


def test_slots_beyond_the_budget_for_page_locked_memory_stay_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.factory.pinnable_nbytes", lambda: 1 << 20)
    loader = DataLoader(Numbered(64, (3, 256, 128)), batch_size=2, pin_memory=Sim())  # 0.75 MiB each
    kept = list(loader)
    assert 0 < loader.statistics().ring.pinned_nbytes <= 1 << 20
    assert [int(number) for _, numbers in kept for number in numbers] == list(range(64))


class BreaksCaptures(Sim):
    """A device that forgets the captures of other threads."""

    def fence(self) -> Any:
        return None if self.capturing else self._engine.record_all()


@pytest.mark.parametrize(("sim_type", "breaks"), [(Sim, False), (BreaksCaptures, True)])
@pytest.mark.parametrize("option", ["device", "pin_memory"])
def test_what_a_loader_does_until_it_ends_breaks_no_capture_in_another_thread(
    option: str, sim_type: type[Sim], breaks: bool
) -> None:
    device = sim_type()
    with captured_elsewhere(device):
        loader: Any = DataLoader(Numbered(64), batch_size=4, **{option: device})
        assert labels(loader) == list(range(64))
        next(iter(loader))
        del loader
        gc.collect()
        assert (device.captures_broken > 0) == (breaks and option == "pin_memory")
        assert device._registered  # until the capture is over
    gc.collect()
    assert not device._registered
