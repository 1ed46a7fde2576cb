"""StepCounts: ranks tell each other, a few steps at a time, how many steps each can take, over the store.

    penstock/steps/<ranks>/<loader>/<round>/<n>    how many ranks have n steps, where that is fewer than asked for
    penstock/steps/<ranks>/<loader>/<round>/in     how many ranks have said
    penstock/steps/<ranks>/<loader>/<round>/done   the fewest and the most, written by the rank that was last to say

A collective would have to fit between those of the training step, on a backend that the host can use. The store of
`init_process_group` is there for every backend: a rank asks it some four times in a round.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.core.errors import RankError
from penstock.distributed.rank_news import store_of_attempt

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0002, 0.02

_loaders: Counter[tuple[int, ...]] = Counter()
"""How many loaders of a group have counted steps: their ranks make and use them in the same order."""


class StepCounts:
    """What the ranks of one group say of one loader. All of them call `agree` equally often.

    Args:
        store: of all ranks.
        name: of the group and the loader.
        ranks: how many say.
        timeout_s: how long to wait for them.
    """

    def __init__(self, store: Any, name: str, ranks: int, timeout_s: float) -> None:
        self._store = store
        self._name = name
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._round = 0

    def agree(self, count: int, most: int, check: Callable[[], None]) -> tuple[int, int]:
        """Return the fewest and the most steps that a rank has, of the next `most`.

        Args:
            count: how many this rank has.
            most: how many all are asked for.
            check: called while this waits; it raises where another rank has failed.

        Raises:
            RankError: some rank has not said in time.
        """
        key = f"{self._name}/{self._round}"
        self._round += 1
        if count < most:
            self._store.add(f"{key}/{count}", 1)
        if self._store.add(f"{key}/in", 1) == self._ranks:
            self._finish(key, most)
        deadline, wait_s = time.monotonic() + self._timeout_s, _FIRST_WAIT_S
        while not self._store.check([f"{key}/done"]):
            check()
            if time.monotonic() > deadline:
                raise RankError(
                    f"after {self._timeout_s:.0f} s only {self._store.add(f'{key}/in', 0)} of {self._ranks} ranks have "
                    "said how many batches of this stream they have; all ranks loop over it together, or use "
                    "uneven='join'"
                )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        fewest, largest = self._store.get(f"{key}/done").split()
        return int(fewest), int(largest)

    def _finish(self, key: str, most: int) -> None:
        """Write the result, and forget the round before, which every rank has read."""
        fewer = {count: self._store.add(f"{key}/{count}", 0) for count in range(most) if self._has(f"{key}/{count}")}
        counts = [*fewer, *([most] if sum(fewer.values()) < self._ranks else [])]
        self._store.set(f"{key}/done", f"{min(counts)} {max(counts)}")
        before = f"{self._name}/{self._round - 2}"
        for name in ("in", "done"):
            self._store.delete_key(f"{before}/{name}")

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


def step_counts(ranks: Sequence[int]) -> StepCounts:
    """Return the step counts of another loader whose samples these ranks of `init_process_group` share out."""
    group = tuple(ranks)
    number, _loaders[group] = _loaders[group], _loaders[group] + 1
    store: Any = _get_default_store()
    own = store_of_attempt(store.clone(), os.environ)
    members = "-".join(map(str, group)) if len(group) < dist.get_world_size() else "all"
    return StepCounts(own, f"penstock/steps/{members}/{number}", len(group), store.timeout.total_seconds())
