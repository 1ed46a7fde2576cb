"""FailureAlarm: when the loader of one rank fails, all others raise instead of waiting in their next collective.

It uses the store of `init_process_group`, over a second connection, which a thread polls four times a second. Training
steps exchange nothing. The rank that fails waits until the others have heard of it: when it ends, torchrun ends them, a
tenth of a second later.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.core.errors import RankError

_failures = 0
"""How many failures this process has signalled or received: the number of the next one, on all ranks.

(Not a number of the pass: one rank may begin a pass alone, to look at a batch.)
"""

_POLL_S = 0.25

_HEARD_S = 2.0
"""How long a rank that fails waits for the others; one that iterates over nothing does not listen."""


class FailureAlarm:
    """Signals the next failure to all ranks, and receives theirs. Needs `init_process_group`.

    Args:
        rank: of this process.
        world: how many ranks there are.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._number = _failures
        self._key = f"penstock/alarm/{self._number}"
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._received: str | None = None
        self._has_signalled = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="penstock-alarm", daemon=True)
        self._thread.start()

    def signal(self, error: BaseException) -> None:
        """Let all ranks know that this one's loader has failed, and wait until they do."""
        self._has_signalled = True
        _count(self._number)
        text = f"the loader of rank {self._rank} failed: {type(error).__name__}: {error}"
        self._call_store("set", self._key, text)
        deadline = time.monotonic() + _HEARD_S
        while time.monotonic() < deadline:
            heard = self._call_store("add", f"{self._key}/heard", 0)
            if heard is None or heard >= self._world or self._closing.wait(0.02):
                return

    def check(self) -> None:
        """Raise if another rank has signalled.

        Raises:
            RankError: its loader has failed.
        """
        if self._received is not None:
            raise RankError(f"{self._received}; no rank can continue without it")

    def close(self) -> None:
        """Stop polling."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _poll(self) -> None:
        while not self._closing.wait(_POLL_S):
            if self._call_store("check", [self._key]):
                self._received = bytes(self._call_store("get", self._key) or b"").decode(errors="replace")
                _count(self._number)
                if not self._has_signalled:
                    # The training loop may be waiting in a collective, and never come back for another batch.
                    sys.stderr.write(f"penstock: rank {self._rank} has received: {self._received}\n")
                self._call_store("add", f"{self._key}/heard", 1)
                return

    def _call_store(self, method: str, *args: Any) -> Any:
        """Call the store; None if the process that serves it has already ended."""
        try:
            return getattr(self._store, method)(*args)
        except (dist.DistError, OSError):
            self._closing.set()
            return None


def _count(number: int) -> None:
    global _failures
    _failures = max(_failures, number + 1)


def start_failure_alarm(rank: int, world: int) -> FailureAlarm | None:
    """Return a running alarm; None with one rank, or without `init_process_group`."""
    if world < 2 or not dist.is_initialized():
        return None
    return FailureAlarm(rank, world)
