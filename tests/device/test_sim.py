"""The simulated accelerator does what an accelerator may do, and no more."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest
import torch
from capture_elsewhere import captured_elsewhere

from penstock import OptionError
from penstock.device import Device, Sim, TensorSpec, device_of
from penstock.device.sim import POISON


def host(nbytes: int = 4096) -> tuple[memoryview, torch.Tensor]:
    """Return a page of host memory, and a uint8 tensor on it."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    return memory, torch.from_numpy(np.frombuffer(memory, np.uint8))


def by_hand(**arguments: object) -> Sim:
    return Sim(by_hand=True, eager=False, **arguments)  # type: ignore[arg-type]


def test_device_memory_is_poisoned_until_its_copy_has_run() -> None:
    sim = by_hand()
    there = sim.to(torch.arange(4))
    assert there.view(torch.uint8).tolist() == [POISON] * 32
    sim.synchronize()
    assert there.tolist() == [0, 1, 2, 3]


def test_a_copy_from_registered_memory_reads_it_late_and_from_other_memory_at_once() -> None:
    sim = by_hand()
    memory, source = host()
    registration = sim.register(memory)
    assert registration is not None
    pinned = sim.to(source)
    source.fill_(7)
    registration.close()
    staged = sim.to(source)
    source.fill_(9)
    sim.synchronize()
    assert (pinned == 7).all()  # before its memory was unlocked
    assert (staged == 7).all()


def test_operations_of_one_stream_run_in_order_and_of_two_in_any() -> None:
    sim, ran = by_hand(), []
    other = sim.stream()
    sim.launch(lambda: ran.append("a"))
    sim.launch(lambda: ran.append("b"))
    sim.launch(lambda: ran.append("c"), other)
    assert sim.step(other)
    while sim.step():
        pass
    assert ran == ["c", "a", "b"]


def test_a_stream_that_waits_for_an_event_stands_still_until_it_passes() -> None:
    sim = by_hand()
    sim.launch(lambda: None)
    event = sim.record_event()
    sim.upload([], after=event)
    assert sim._up not in sim.runnable()
    assert not event.query()
    event.synchronize()
    assert sim._up in sim.runnable()


def test_a_fence_stands_for_every_stream_and_is_refused_while_capturing() -> None:
    sim = by_hand()
    other = sim.stream()
    sim.launch(lambda: None, other)
    fence = sim.fence()
    assert fence is not None
    while sim.step(sim.consumer) or sim.step(sim._up) or sim.step(sim._down):
        pass
    assert not fence.query()
    fence.synchronize()
    sim.capturing = True
    assert sim.fence() is None
    assert Sim(has_fence=False).fence() is None


def test_a_fence_stands_for_every_device_of_the_machine() -> None:
    sim = by_hand()
    other = Sim(beside=sim)
    other.launch(lambda: None)
    fence = sim.fence()
    assert fence is not None
    while any(sim.step(stream) for stream in sim.runnable() if stream is not other.consumer):
        pass
    assert not fence.query()
    fence.synchronize()


def test_each_thread_has_its_own_current_stream_on_each_device() -> None:
    sim = Sim()
    other = Sim(beside=sim)
    sim.consumer = own = sim.stream("own")
    elsewhere: list[object] = []
    thread = threading.Thread(target=lambda: elsewhere.append(sim.consumer))
    thread.start()
    thread.join()
    assert sim.consumer is own
    assert own not in (elsewhere[0], other.consumer)
    assert elsewhere[0] is not other.consumer


def test_what_waits_for_everything_breaks_a_capture_of_any_thread() -> None:
    sim = Sim()
    registration = sim.register(host()[0])
    assert registration is not None
    with captured_elsewhere(sim):
        assert not sim.capturing
        assert sim.fence() is None
        registration.close()
        sim.record_event().synchronize()
        assert sim.captures_broken == 0
        sim.synchronize()
        assert sim.captures_broken == 1
        assert sim._registered
    assert not sim._registered


def test_waiting_for_what_cannot_pass_is_an_error_rather_than_a_hang() -> None:
    sim, never = by_hand(), by_hand()
    stuck = sim.upload([], after=never.record_event())
    with pytest.raises(RuntimeError, match="can never pass"):
        stuck.synchronize()


def test_dropped_memory_is_used_again_and_beyond_the_capacity_there_is_none() -> None:
    sim = Sim(capacity_nbytes=4096)
    spec = TensorSpec.of(torch.empty(2048, dtype=torch.uint8))
    first, second = sim.empty(spec), sim.empty(spec)
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 2\.0 KiB of 4\.0 KiB"):
        sim.empty(spec)
    address = first.data_ptr()
    del first
    assert sim.empty(spec).data_ptr() == address
    del second
    assert sim.empty(TensorSpec.of(torch.empty(1024, dtype=torch.uint8))).shape == (1024,)


def test_chosen_allocations_fail() -> None:
    sim = Sim()
    sim.fail_allocations(1)
    spec = TensorSpec.of(torch.empty(8))
    sim.empty(spec)
    with pytest.raises(torch.OutOfMemoryError):
        sim.empty(spec)
    sim.empty(spec)


def test_host_memory_beyond_what_may_be_pinned_is_refused() -> None:
    sim = Sim(pinnable_nbytes=4096)
    memory, _ = host()
    registration = sim.register(memory)
    assert registration is not None
    assert sim.register(memory) is None
    registration.close()
    assert sim.register(memory) is not None


def test_operations_run_as_time_passes_unless_driven_by_hand() -> None:
    sim = Sim(bandwidth=1e9, delay_s=1e-3)
    there = sim.to(torch.arange(5))
    back = torch.empty(5, dtype=torch.int64)
    sim.download([(back, there)]).synchronize()
    assert back.tolist() == [0, 1, 2, 3, 4]


def test_the_error_of_a_kernel_is_raised_by_the_next_wait() -> None:
    sim = Sim()

    def fail() -> None:
        raise ZeroDivisionError

    sim.launch(fail)
    with pytest.raises(ZeroDivisionError):
        sim.synchronize()


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4, 5)])
def test_a_copy_keeps_the_strides(shape: tuple[int, ...]) -> None:
    sim = Sim()
    source = torch.arange(int(np.prod(shape))).view(shape).transpose(0, -1)
    there = sim.to(source)
    sim.synchronize()
    assert there.stride() == source.clone().stride()
    assert torch.equal(there, source)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("gpu9", "is not a device"), ("cuda", "there is no accelerator here"), ("meta", "there is no accelerator")],
)
def test_a_device_that_is_not_here_is_one_clear_error(wanted: str, words: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(OptionError, match=words):
        device_of(wanted)


def test_devices_are_found_by_name() -> None:
    assert device_of("cpu").is_host
    assert device_of("sim") is device_of("sim")
    mine: Device = Sim()
    assert device_of(mine) is mine
