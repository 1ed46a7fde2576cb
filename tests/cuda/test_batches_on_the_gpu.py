"""On a real GPU: what `to_device/test_prefetch.py` proves on the simulated one, with checksums and streams."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sample_sets import Nested, Numbered
from scripts import run
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, infer
from penstock.core.shared_segment import PrivateSegment
from penstock.core.tree import map_leaves
from penstock.device import device_of
from penstock.observe.meters.transfer import measure_transfer

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

SHAPE = (3, 64, 64)


def is_right(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return, on the device and without waiting, whether every byte of a batch of `Numbered` is right."""
    return (images == labels.view(-1, 1, 1, 1).float()).all()


@pytest.mark.arithmetic
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_ordered_on_the_current_stream(workers: int) -> None:
    loader = DataLoader(Numbered(600, SHAPE), batch_size=16, num_workers=workers, device="cuda")
    for _ in range(3):
        verdicts, seen = [], []
        for images, labels in loader:
            assert images.is_cuda
            verdicts.append(is_right(images, labels))
            seen.append(labels)
        assert bool(torch.stack(verdicts).all())
        assert torch.cat(seen).tolist() == list(range(600))
    assert loader.statistics().ring.pinned_nbytes > 0


@pytest.mark.arithmetic
def test_the_current_stream_may_be_any() -> None:
    stream, verdicts = torch.cuda.Stream(), []
    loader = DataLoader(Numbered(400, SHAPE), batch_size=16, num_workers=2, device="cuda")
    with torch.cuda.stream(stream):
        for images, labels in loader:
            torch.cuda._sleep(200_000)
            verdicts.append(is_right(images, labels))
    stream.synchronize()
    assert bool(torch.stack(verdicts).all())


@pytest.mark.arithmetic
def test_a_consumer_that_lags_behind_reads_what_it_was_given() -> None:
    verdicts = []
    for images, labels in DataLoader(Numbered(400, SHAPE), batch_size=16, num_workers=2, device="cuda"):
        torch.cuda._sleep(2_000_000)
        verdicts.append(is_right(images, labels))
        del images, labels
    assert bool(torch.stack(verdicts).all())


def test_slots_are_pinned_for_torch_too() -> None:
    for images, _ in DataLoader(Numbered(64, SHAPE), batch_size=16, num_workers=2, pin_memory=True):
        assert images.is_pinned()


@pytest.mark.arithmetic
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_that_the_user_starts_on_several_streams_are_never_overtaken(workers: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    loader = DataLoader(Numbered(3000, SHAPE), batch_size=8, num_workers=workers, pin_memory=True)
    verdicts = []
    for number, (images, labels) in enumerate(loader):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(500_000)  # the copy starts long after the views have died
            verdicts.append(is_right(images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)))
        del images, labels
    torch.cuda.synchronize()
    assert bool(torch.stack(verdicts).all())


@pytest.mark.parametrize("ring_bytes", [None, 16 * 8 * 3 * 64 * 64 * 4])
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"pin_memory": True}], ids=str)
def test_a_host_with_nothing_else_to_do_is_at_most_six_steps_ahead(options: Any, ring_bytes: int | None) -> None:
    loader = DataLoader(Numbered(640, SHAPE), batch_size=8, num_workers=2, ring_bytes=ring_bytes, **options)
    steps: list[torch.cuda.Event] = []
    for images, _ in loader:
        assert sum(not step.query() for step in steps) <= 6
        there = images.to("cuda", non_blocking=True)
        torch.cuda._sleep(10_000_000)
        there.clone()
        steps.append(torch.cuda.Event())
        steps[-1].record()
        del images, there
    assert loader.statistics().ring.copied_out == 0


def test_how_long_the_gpu_waited_for_copies_is_timed() -> None:
    loader = DataLoader(Numbered(400, SHAPE), batch_size=8, num_workers=2, device="cuda")
    for number, _ in enumerate(loader):
        if number == 5:
            assert loader.statistics().copy_wait_s is None
        torch.cuda._sleep(1_000_000)
    assert loader.statistics().copy_wait_s is not None


def test_a_driver_event_stands_for_all_streams() -> None:
    cuda: Any = device_of("cuda")
    if not cuda.has_fence:
        pytest.skip("this driver records no context events")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    fence = cuda.fence()
    assert not fence.query()
    side.synchronize()
    fence.synchronize()
    assert fence.query()


@pytest.mark.arithmetic
def test_no_fence_is_recorded_while_a_graph_is_captured() -> None:
    cuda = device_of("cuda")
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        assert cuda.fence() is None
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 8


@pytest.mark.arithmetic
def test_a_step_in_a_graph_and_a_compiled_one_take_batches() -> None:
    static = torch.zeros(16, *SHAPE, device="cuda")
    out = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(static.flatten(1).mean(1))
    for images, labels in DataLoader(Numbered(160, SHAPE), batch_size=16, num_workers=2, device="cuda"):
        static.copy_(images)
        graph.replay()
        assert torch.allclose(out, labels.float())


def test_registered_memory_is_page_locked_until_it_is_closed() -> None:
    segment = PrivateSegment(1 << 20)
    tensor = torch.from_numpy(np.frombuffer(segment.memory, np.uint8))
    registration = device_of("cuda").register(segment.memory)
    assert registration is not None
    assert tensor.is_pinned()
    registration.close()
    assert not tensor.is_pinned()


def test_nested_batches_are_those_of_torch() -> None:
    def plain(batch: Any) -> Any:
        return map_leaves(lambda leaf: leaf.cpu().tolist() if isinstance(leaf, torch.Tensor) else leaf, batch)

    ours = DataLoader(Nested(24), batch_size=4, num_workers=2, device="cuda")
    theirs = TorchDataLoader(Nested(24), batch_size=4, num_workers=2)
    assert list(map(plain, ours)) == list(map(plain, theirs))


def test_channels_last_stays_channels_last() -> None:
    data = torch.zeros(8, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    batch = next(iter(DataLoader(data, batch_size=None, sampler=[slice(0, 8)], device="cuda")))
    assert batch.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.arithmetic
def test_an_epoch_can_be_interrupted_and_started_again() -> None:
    loader = DataLoader(Numbered(200, SHAPE), batch_size=8, num_workers=2, device="cuda", persistent_workers=True)
    for _ in range(5):
        next(iter(loader))
    verdicts = [is_right(images, labels) for images, labels in loader]
    assert bool(torch.stack(verdicts).all())


def test_inference_hands_out_whole_results() -> None:
    model = torch.nn.Flatten().cuda()
    loader = DataLoader(Numbered(300, SHAPE), batch_size=16, num_workers=2, device="cuda")
    outputs = list(infer(model, loader, forward=lambda flat, batch: flat(batch[0])))
    rows = torch.cat(outputs)
    assert not rows.is_cuda
    assert torch.equal(rows, torch.arange(300.0)[:, None].expand(300, rows.shape[1]))


def test_the_doctor_measures_the_link() -> None:
    report = measure_transfer((64, 3, 224, 224), torch.float32, device_of("cuda"))
    assert {copy.source for copy in report.device_copies} >= {"pageable memory", "memory pinned by torch", "slot"}
    assert set(report.step_s) == {"alone", "direct", "ahead"}
    assert len(report.advice()) >= 4


def test_memory_that_cannot_be_pinned_is_one_warning() -> None:
    cuda = device_of("cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        segment = PrivateSegment(1 << 20)
        first = cuda.register(segment.memory)
        assert cuda.register(segment.memory) is None  # it is registered already
        assert cuda.register(segment.memory) is None
    assert first is not None
    first.close()
    assert len([one for one in caught if "page-lock" in str(one.message)]) <= 1


@pytest.mark.arithmetic
def test_batches_are_handed_out_while_a_graph_is_captured() -> None:
    graph, total = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
    batches = iter(DataLoader(Numbered(64, SHAPE), batch_size=16, num_workers=2, device="cuda"))
    first = next(batches)
    with torch.cuda.graph(graph):
        total += 1
        second = next(batches)
    graph.replay()
    rest = [first, second, *batches]
    assert all(bool(is_right(*batch)) for batch in rest)
    assert torch.cat([labels for _, labels in rest]).tolist() == list(range(64))
    assert total.item() == 1


@pytest.mark.arithmetic
def test_each_of_several_gpus_has_its_own_batches() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    loaders = [DataLoader(Numbered(160, SHAPE), batch_size=16, device=f"cuda:{index}") for index in range(2)]
    for first, second in zip(*loaders, strict=True):
        assert [first[0].device.index, second[0].device.index] == [0, 1]
        assert bool(is_right(*first))
        assert bool(is_right(*second))


def test_the_limit_on_locked_memory_is_obeyed_or_reported() -> None:
    script = """
        import resource, warnings
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
        from penstock.device import device_of
        from penstock.core.shared_segment import PrivateSegment
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            segment = PrivateSegment(64 << 20)
            registration = device_of("cuda").register(segment.memory)
        assert registration is not None or "RLIMIT_MEMLOCK is 64.0 KiB" in str(caught[0].message)
        print("locked past the limit" if registration else "refused")
    """
    ran = run(script)
    assert ran.stdout.strip() in ("locked past the limit", "refused"), ran.stderr
