"""Messages arrive whole, once, and never after their reader has gone."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from penstock.loader.transport import channel
from penstock.loader.transport.control_page import ControlPage


@pytest.mark.parametrize("nbytes", [0, 1, channel.SPILL_NBYTES, channel.SPILL_NBYTES + 1, 3_000_000])
def test_a_message_of_any_size_arrives_whole(nbytes: int) -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        worker_type = os.urandom(nbytes)
        assert channel.send(ours, worker_type)
        assert channel.Receiver(theirs).receive() == (worker_type, [])


@pytest.mark.parametrize("nbytes", [3, 100_000])
def test_descriptors_travel_beside_a_message(nbytes: int) -> None:
    ours, theirs = channel.pair()
    reader, writer = os.pipe()
    with ours, theirs:
        channel.send(ours, b"x" * nbytes, [writer])
        os.close(writer)
        message = channel.Receiver(theirs).receive()
        assert message is not None
        os.write(message[1][0], b"hello")
        assert os.read(reader, 5) == b"hello"
        os.close(message[1][0])
    os.close(reader)


def test_of_several_receivers_one_gets_each_message() -> None:
    ours, theirs = channel.pair()
    got: list[bytes] = []

    def take() -> None:
        receiver = channel.Receiver(theirs)
        while (message := receiver.receive()) is not None and message[0] != b"end":
            got.append(message[0])

    threads = [threading.Thread(target=take) for _ in range(3)]
    with ours, theirs:
        for thread in threads:
            thread.start()
        sent = [str(number).encode() for number in range(500)]
        for worker_type in [*sent, *[b"end"] * 3]:
            channel.send(ours, worker_type)
        for thread in threads:
            thread.join()
    assert sorted(got) == sorted(sent)


def test_a_full_channel_returns_false_and_loses_nothing() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        sent = 0
        while channel.send(ours, b"x" * 1000, block=False):
            sent += 1
        receiver = channel.Receiver(theirs)
        assert sum(receiver.receive(block=False) is not None for _ in range(sent)) == sent
        assert receiver.receive(block=False) is None


def test_a_hangup_is_noticed_on_both_sides() -> None:
    ours, theirs = channel.pair()
    theirs.close()
    with ours, pytest.raises(channel.Closed):
        channel.send(ours, b"x")
    ours, theirs = channel.pair()
    channel.send(ours, b"last")
    ours.close()
    with theirs:
        receiver = channel.Receiver(theirs)
        assert receiver.receive() == (b"last", [])
        with pytest.raises(channel.Closed):
            receiver.receive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_lock_ends_with_its_holder() -> None:
    control = ControlPage.make(2)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with control.lock():
            control.cells[control.claim_cell(0)] = 5
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    with control.lock():
        assert control.claimed(0) == 4
        assert control.claimed(1) is None
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(tell)
    control.close()
