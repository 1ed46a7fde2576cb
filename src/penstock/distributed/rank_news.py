"""RankNews: messages from one rank to all others, in one order, over the store of `init_process_group`.

Message k of a job is under the key `penstock/news/<k>`; whoever is first to write it has written it. Each rank asks,
over one connection of its own, whether its next message is there: once in `POLL_S` seconds, however many loaders
listen, and ranks that begin together ask in turn. Training steps exchange nothing.

torchrun may give a job that it starts again the store of the attempt before, with all that is in it (torch 2.13). So
all keys, these and those of listeners, have a prefix of the attempt.

Rejected: to wait for the key (`Store.wait`). It takes no requests, but a thread inside of it cannot be ended, torch
prints a warning at each timeout and at the end of the process that serves the store, and Python aborts when it ends
meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

POLL_S = 2.0
"""How often a rank asks for news: 2 048 requests a second of 4 096 ranks, where a store answers some 30 000."""

SETTLE_S = 0.25
"""How often it asks while a listener expects news."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank has to say to all."""

    kind: str
    """What it is about, a word."""

    rank: int
    """Who has sent it."""

    text: str
    """The rest."""

    key: str = ""
    """Where it is in the store."""

    def encode(self) -> str:
        """Return it as the store has it."""
        return f"{self.kind} {self.rank} {self.text}"

    @classmethod
    def decode(cls, key: str, data: bytes) -> Message:
        """Return the message that the store has under a key."""
        kind, rank, text = data.decode(errors="replace").split(" ", 2)
        return cls(kind, int(rank), text, key)


class Listener(Protocol):
    """Hears all messages, in the thread of the news."""

    def receive(self, message: Message) -> None:
        """Take the next message, one's own too."""

    def advance(self) -> bool:
        """Do what is to be done between two requests; return whether another message is expected soon."""

    def end(self) -> None:
        """Leave what the others need from a program that ends."""


class RankNews:
    """Posts messages and hands those of all ranks to listeners, in the same order on all ranks.

    A thread asks for messages while somebody listens. One that was posted meanwhile is read by the next listener.

    Args:
        rank: of this process.
        world: how many ranks there are.
        store: a connection for this object alone.
        is_valid: returns False when the process group has gone; nothing is asked then.
        clock: in seconds.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        *,
        is_valid: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._is_valid = is_valid
        self._clock = clock
        self.messages: list[Message] = []
        """Those that this rank has read."""
        self.is_lost = False
        """Whether the process that serves the store has ended."""
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()  # reentrant: a finalizer that runs inside of it may leave
        self._wakes: queue.SimpleQueue[threading.Thread | None] = queue.SimpleQueue()  # signal handlers may put into it
        self._thread: threading.Thread | None = None
        # All ranks begin at once, and must not ask at once. It outlives the thread: passes may be short.
        self._due_s = clock() + POLL_S * (rank + 1) / world

    def listen(self, listener: Listener) -> None:
        """Hand messages to `listener` from now on."""
        with self._lock:
            self._listeners.append(listener)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-news", daemon=True)
                self._thread.start()

    def leave(self, listener: Listener) -> None:
        """Hand nothing more to `listener`; the last one to leave ends the thread."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            thread = self._thread if not self._listeners else None
            if thread is not None:
                self._thread = None
        if thread is not None and threading.current_thread() is not thread:
            self._wakes.put(thread)
            thread.join()

    def close(self) -> None:
        """Have all listeners leave, because the program ends."""
        for listener in [*self._listeners]:
            listener.end()
            self.leave(listener)

    def wake(self) -> None:
        """Have the thread ask, or advance, now. Signal handlers may call it."""
        self._wakes.put(None)

    def post(self, kind: str, text: str) -> str | None:
        """Send a message to all ranks, unless one of its kind is there that this rank has not read yet.

        Returns:
            The key of the message that all ranks read; None if the process that serves the store has ended.
        """
        number = len(self.messages)
        own = Message(kind, self.rank, text).encode()
        while True:
            key = f"penstock/news/{number}"
            found = self.call_store("compare_set", key, "", own)
            if found is None:
                return None
            if Message.decode(key, bytes(found)).kind == kind:
                self.wake()
                return key
            number += 1

    def call_store(self, method: str, *args: Any) -> Any:
        """Call the store; None if the process that serves it has already ended."""
        if self.is_lost or not self._is_valid():
            return None
        try:
            return getattr(self._store, method)(*args)
        except (dist.DistError, OSError):
            self.is_lost = True
            return None

    def ask(self) -> float:
        """Ask for messages and hand them on; return after how many seconds to ask again."""
        is_settling = [listener.advance() for listener in [*self._listeners]]  # a copy: others may come and leave
        while (message := self._next_message()) is not None:
            for listener in [*self._listeners]:
                listener.receive(message)
            self.call_store("add", f"{message.key}/heard", 1)
            is_settling = [listener.advance() for listener in [*self._listeners]]
        return SETTLE_S if any(is_settling) else POLL_S

    def _next_message(self) -> Message | None:
        key = f"penstock/news/{len(self.messages)}"
        if not self.call_store("check", [key]):
            return None
        data = self.call_store("get", key)
        if data is None:
            return None
        self.messages.append(Message.decode(key, bytes(data)))
        return self.messages[-1]

    def _run(self) -> None:
        while self._thread is threading.current_thread() and self._is_valid() and not self.is_lost:
            is_woken = False
            with contextlib.suppress(queue.Empty):
                is_woken = self._wakes.get(timeout=max(0.0, self._due_s - self._clock())) is None
            if self._thread is not threading.current_thread():
                return
            if is_woken or self._clock() >= self._due_s:
                self._due_s = self._clock() + self.ask()
        if self.is_lost:
            for listener in [*self._listeners]:
                listener.advance()


_ATTEMPT = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "GROUP_WORLD_SIZE")
"""What tells the attempts of a job apart. Those after machines have joined or left count as no restart."""


def store_of_attempt(store: Any, environment: Mapping[str, str]) -> Any:
    """Return a store without what earlier attempts of torchrun have left in it."""
    attempt = "/".join(environment.get(name, "") for name in _ATTEMPT)
    return dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]


_news: tuple[Any, RankNews] | None = None
"""The default process group and its news."""


def rank_news() -> RankNews | None:
    """Return the news of the ranks of `init_process_group`; None with one rank, or without it."""
    global _news
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    group = _get_default_group()
    if _news is None or _news[0] is not group:
        store = store_of_attempt(_get_default_store().clone(), os.environ)  # type: ignore[attr-defined]
        news = RankNews(dist.get_rank(), dist.get_world_size(), store, is_valid=lambda: _is_default(group))
        atexit.register(news.close)  # a thread inside the store, when Python ends, makes it abort
        _news = (group, news)
    return _news[1]


def _is_default(group: Any) -> bool:
    return dist.is_initialized() and _get_default_group() is group
