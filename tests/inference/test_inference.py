"""`infer` hands out whole outputs in order, whatever the device, and keeps a live source's latency bounded."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

from penstock import DataLoader, OptionError, Sim, infer
from penstock.inference import infer as inference

DATA = torch.arange(24_000.0).view(240, 100)


def slow_sim() -> Sim:
    return Sim(bandwidth=5e7, delay_s=5e-4)


@pytest.mark.parametrize("device", ["cpu", "sim", slow_sim()], ids=["cpu", "sim", "slow sim"])
@pytest.mark.parametrize("workers", [0, 2])
def test_outputs_are_the_models_in_order(device: Any, workers: int) -> None:
    loader = DataLoader(DATA, batch_size=16, num_workers=workers, device=device)
    outputs = list(infer(torch.nn.Tanh(), loader))
    assert len(outputs) == 15
    assert torch.equal(torch.cat(outputs), DATA.tanh())


@pytest.mark.parametrize("device", ["cpu", slow_sim()], ids=["cpu", "slow sim"])
def test_any_iterable_of_batches_will_do(device: Any) -> None:
    loader = TorchDataLoader(DATA, batch_size=50)
    assert torch.equal(torch.cat(list(infer(torch.neg, loader, device=device))), -DATA)


def test_batches_are_passed_as_arguments_or_as_forward_says() -> None:
    pairs = DataLoader(TensorDataset(DATA, 2 * DATA), batch_size=60)
    named = DataLoader([{"input": row, "other": row} for row in DATA], batch_size=60)
    assert torch.equal(torch.cat(list(infer(torch.add, pairs))), 3 * DATA)
    assert torch.equal(torch.cat(list(infer(torch.add, named))), 2 * DATA)
    firsts = infer(torch.neg, pairs, forward=lambda model, batch: model(batch[0]))
    assert torch.equal(torch.cat(list(firsts)), -DATA)


def test_nested_outputs_keep_their_structure_and_non_contiguous_ones_their_values() -> None:
    def model(batch: torch.Tensor) -> dict[str, Any]:
        return {"t": batch.t(), "pair": (batch.sum(), "words"), "half": batch.half()}

    out = next(iter(infer(model, [DATA], device=slow_sim())))
    assert torch.equal(out["t"], DATA.t())
    assert (out["pair"][0], out["pair"][1]) == (DATA.sum(), "words")
    assert torch.equal(out["half"], DATA.half())


def test_no_gradient_is_kept() -> None:
    model = torch.nn.Linear(100, 2)
    assert not any(out.requires_grad for out in infer(model, DataLoader(DATA, batch_size=100)))


def test_breaking_off_leaves_nothing_behind() -> None:
    outputs = infer(torch.neg, DataLoader(DATA, batch_size=8, num_workers=2, device=slow_sim()))
    first = next(outputs)
    outputs.close()
    assert torch.equal(first, -DATA[:8])


def test_an_error_of_the_source_comes_after_the_outputs_before_it() -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield DATA[:2]
        raise LookupError("no more")

    outputs = infer(torch.neg, batches(), device="sim")
    with pytest.raises(LookupError, match="no more"):
        list(outputs)


@pytest.mark.parametrize("device", ["cpu", slow_sim()], ids=["cpu", "slow sim"])
def test_a_live_source_is_flushed_when_its_samples_have_waited_enough(device: Any) -> None:
    camera: queue.Queue[torch.Tensor | None] = queue.Queue()
    outputs = infer(torch.neg, iter(camera.get, None), batch_size=4, max_latency_s=0.05, device=device)
    seen: list[torch.Tensor] = []
    for size in (1, 3, 4, 2):
        for row in range(size):
            camera.put(DATA[row])
        batch = next(outputs)  # the source gives nothing more: without the flush this would never return
        assert torch.equal(batch, -DATA[:size])
        seen.append(batch)
    camera.put(None)
    assert list(outputs) == []
    assert [len(batch) for batch in seen] == [1, 3, 4, 2]


def test_a_live_source_without_a_latency_waits_for_full_batches() -> None:
    def samples() -> Iterator[torch.Tensor]:
        for row in DATA[:10]:
            time.sleep(0.002)
            yield row

    assert [len(batch) for batch in infer(torch.neg, samples(), batch_size=4)] == [4, 4, 2]


def test_an_error_of_a_live_source_comes_after_its_samples() -> None:
    def samples() -> Iterator[torch.Tensor]:
        yield from DATA[:3]
        raise OSError("the camera is unplugged")

    outputs = infer(torch.neg, samples(), batch_size=2, max_latency_s=10.0)
    assert torch.equal(next(outputs), -DATA[:2])
    assert torch.equal(next(outputs), -DATA[2:3])
    with pytest.raises(OSError, match="unplugged"):
        next(outputs)


def test_leaving_a_live_source_ends_its_thread() -> None:
    def samples() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.001)
            yield DATA[0]

    outputs = infer(torch.neg, samples(), batch_size=2)
    next(outputs)
    outputs.close()
    deadline = time.monotonic() + 10
    while any(thread.name == "penstock-live-source" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_options_that_need_samples_say_so() -> None:
    with pytest.raises(OptionError, match="pass batch_size as well"):
        infer(torch.neg, [DATA], max_latency_s=0.1)


@pytest.mark.parametrize("error", [ValueError("no such class"), StopIteration("no more")], ids=["own", "stop"])
def test_outputs_before_the_one_that_a_model_fails_at_come_first(error: Exception) -> None:
    calls: list[None] = []

    def model(batch: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 6:
            raise error
        return batch.clone()

    outputs = infer(model, (torch.full((2,), float(number)) for number in range(9)), device=Sim())
    assert [int(next(outputs)[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises((ValueError, RuntimeError), match=r"no such class|StopIteration"):
        next(outputs)


class Broken(Sim):
    """A device on which, once it is broken, every wait raises."""

    is_broken = False

    def _record(self, stream: Any) -> Any:
        event = super()._record(stream)
        wait = event.synchronize

        def synchronize() -> None:
            if self.is_broken:
                raise torch.AcceleratorError("CUDA error: some later call")
            wait()

        event.synchronize = synchronize
        return event


def test_on_a_broken_device_the_models_error_is_raised_and_the_outputs_memory_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim, calls, closed = Broken(), [], []

    class Watched(inference.Ring):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def model(batch: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 4:
            sim.is_broken = True
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return batch.clone()

    monkeypatch.setattr(inference, "Ring", Watched)
    outputs = infer(model, (torch.full((2,), float(number)) for number in range(9)), device=sim)
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        list(outputs)
    assert len(closed) == 1


def test_an_output_that_is_copied_to_a_device_and_dropped_is_not_overwritten() -> None:
    sim = Sim(by_hand=True)
    behind = sim.stream("behind")  # runs when nothing else can
    copies = []
    for output in infer(torch.clone, TorchDataLoader(DATA, batch_size=16), device=sim):
        copies.append(sim.to(output, behind))
        del output
    sim.synchronize()
    assert torch.equal(torch.cat(copies), DATA)


def test_outputs_are_pageable_where_a_device_has_no_fence() -> None:
    sim = Sim(has_fence=False)
    outputs = list(infer(torch.clone, TorchDataLoader(DATA, batch_size=16), device=sim))
    assert torch.equal(torch.cat(outputs), DATA)
    assert sim.counts["registered"] == 0


def test_an_output_on_another_device_is_copied_by_torch_which_waits_for_what_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OwnOnly(Sim):
        def download(self, copies: Any) -> Any:
            assert all(source.device == self.torch_device for _, source in copies)
            return super().download(copies)

    monkeypatch.setattr(inference, "_to_host", lambda leaf: leaf.device.type)
    outputs = infer(lambda x: {"here": x, "there": x.to("meta")}, [torch.arange(3.0)], device=OwnOnly())
    assert [(out["here"].tolist(), out["there"]) for out in outputs] == [([0, 1, 2], "meta")]


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on a GPU, until it is brought to the host."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_outputs_of_a_function_that_takes_batches_to_a_gpu_itself_come_to_the_host() -> None:
    batches = [torch.arange(3) + number for number in range(4)]
    outputs = list(infer(lambda batch: {"scores": batch.as_subclass(Elsewhere), "of": "them"}, batches))
    assert [type(output["scores"]) for output in outputs] == [torch.Tensor] * 4
    assert all(torch.equal(output["scores"], batch) for output, batch in zip(outputs, batches, strict=True))
