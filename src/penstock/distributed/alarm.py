"""The alarm: one rank whose loader fails tells all others, which else would wait for it in their next collective.

It goes over the store that the ranks have met by, on a connection of its own: a thread looks there four times a
second. Nothing is exchanged in a step.
"""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.core.errors import RankError

_passes = itertools.count()
"""Ranks begin their passes in the same order, so that a number is the same pass on all of them."""

_EVERY_S = 0.25


class Alarm:
    """Tells all ranks of a failure in this pass, and is told of theirs. Ranks must have met (`init_process_group`).

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._key = f"penstock/alarm/{next(_passes)}"
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._heard: str | None = None
        self._has_rung = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="penstock-alarm", daemon=True)
        self._thread.start()

    def ring(self, error: BaseException) -> None:
        """Tell all ranks that this one's loader has failed."""
        self._has_rung = True
        words = f"the loader of rank {self._rank} failed: {type(error).__name__}: {error}"
        self._reach("set", self._key, words)

    def check(self) -> None:
        """Raise what another rank has told.

        Raises:
            RankError: its loader has failed.
        """
        if self._heard is not None:
            raise RankError(f"{self._heard}; no rank can go on without it")

    def close(self) -> None:
        """Listen no more."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _listen(self) -> None:
        while not self._closing.wait(_EVERY_S):
            if self._reach("check", [self._key]):
                self._heard = bytes(self._reach("get", self._key) or b"").decode(errors="replace")
                if not self._has_rung:
                    # The training loop may be waiting in a collective, and never come back for another batch.
                    sys.stderr.write(f"penstock: rank {self._rank} has heard that {self._heard}\n")
                return

    def _reach(self, method: str, *args: Any) -> Any:
        """Call the store; whoever holds it may be gone already."""
        try:
            return getattr(self._store, method)(*args)
        except (dist.DistError, OSError):
            self._closing.set()
            return None


def alarm_for(rank: int, world: int) -> Alarm | None:
    """Return an alarm where there are ranks that have met."""
    if world < 2 or not dist.is_initialized():
        return None
    return Alarm(rank)
