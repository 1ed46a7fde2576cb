"""A worker's inbox: messages in order, and files of tasks requested before the worker comes to them."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.errors import TransportError
from penstock.data.storage.object_batch import ObjectBatch
from penstock.loader.transport import channel
from penstock.loader.workers.messages import TASK
from penstock.loader.workers.process_main import Inbox


class Prefetched(ObjectBatch):
    """Says what it is of, and whether it was closed."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__([])
        self.indices = indices
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Prefetch:
    """Prefetches, and sets an event each time."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, indices: list[int]) -> ObjectBatch:
        self.threads.append(threading.current_thread())
        self.called.set()
        if not indices:
            raise ValueError("nothing to fetch")
        return Prefetched(indices)


@pytest.fixture
def opened() -> Iterator[tuple[socket.socket, Inbox, Prefetch]]:
    ours, theirs = channel.pair()
    threads, prefetch = set(threading.enumerate()), Prefetch()
    inbox = Inbox(theirs, lambda epoch: epoch == 0)
    inbox.look_ahead(prefetch)
    yield ours, inbox, prefetch
    ours.close()
    with inbox.working():  # the thread sees that the channel has ended
        for thread in set(threading.enumerate()) - threads:
            thread.join(600.0)
    theirs.close()


def task(seq: int, indices: list[int], epoch: int = 0) -> bytes:
    return b"W" + TASK.pack(seq, epoch, False, 0, 0, 0, 0, 0, False, 0) + pickle.dumps(indices)


def test_messages_come_in_order_whether_the_thread_has_taken_them_or_not(opened: Any) -> None:
    ours, inbox, prefetch = opened
    sent = [b"S1", task(1, [1]), b"F1", task(2, [2]), task(3, [3]), b"E"]
    for message in sent[:4]:
        channel.send(ours, message)
    received = [inbox.receive()[0]]
    with inbox.working():
        prefetch.called.wait()
        channel.send(ours, sent[4])
        channel.send(ours, sent[5])
    received += [inbox.receive()[0] for _ in sent[1:]]
    assert received == sent
    assert not inbox.has_taken


def test_the_files_of_a_task_are_requested_in_the_thread_once_and_found_by_the_task(opened: Any) -> None:
    ours, inbox, prefetch = opened
    channel.send(ours, task(7, [4, 2]))
    with inbox.working():
        prefetch.called.wait()
    inbox.receive()
    found = inbox.prefetched(7, [4, 2])
    assert isinstance(found, Prefetched)
    assert found.indices == [4, 2]
    assert [thread.name for thread in prefetch.threads] == ["penstock-look-ahead"]
    again = inbox.prefetched(7, [4, 2])
    assert again is not found, "what the thread has not requested is requested now"
    assert prefetch.threads[1:] == [threading.current_thread()]


def test_nothing_is_taken_while_the_worker_does_not_work(opened: Any) -> None:
    ours, inbox, prefetch = opened
    with inbox.working():
        pass
    channel.send(ours, task(1, [1]))
    assert inbox.receive()[0] == task(1, [1])
    assert not prefetch.threads


def test_tasks_of_an_epoch_that_is_over_and_those_that_cannot_be_fetched_are_left_alone(opened: Any) -> None:
    ours, inbox, prefetch = opened
    for message in (task(1, [1], epoch=5), task(2, []), task(3, [3])):
        channel.send(ours, message)
    with inbox.working():
        while not inbox._prefetched:
            prefetch.called.wait()
    assert [inbox.receive()[0] for _ in range(3)] == [task(1, [1], epoch=5), task(2, []), task(3, [3])]
    assert [*inbox._prefetched] == [3]
    dropped = inbox._prefetched[3]
    inbox.drop_prefetched(3)
    inbox.drop_prefetched(1)
    assert isinstance(dropped, Prefetched)
    assert dropped.is_closed


def test_what_fails_in_the_thread_is_raised_in_its_place(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, inbox, _ = opened
    failed = threading.Event()
    receive = inbox._receiver.receive

    def fail_once(*, block: bool = True) -> Any:
        message = receive(block=block)
        if message is not None and message[0] == b"S":
            failed.set()
            raise TransportError("no descriptor is left")
        return message

    monkeypatch.setattr(inbox._receiver, "receive", fail_once)
    channel.send(ours, b"S")
    with inbox.working():
        failed.wait()
    channel.send(ours, b"Q")
    with pytest.raises(TransportError):
        inbox.receive()
    assert inbox.receive()[0] == b"Q"


def test_the_end_of_the_channel_is_seen_by_the_worker(opened: Any) -> None:
    ours, inbox, _ = opened
    with inbox.working():
        channel.send(ours, b"E")
        ours.close()
    assert inbox.receive()[0] == b"E"
    with pytest.raises(channel.Closed):
        inbox.receive()
    with inbox.working():
        pass
