"""StopAgreement: ranks stop at the same step when one of them is asked to, without a collective.

Ranks count their steps, and may be some steps apart. While nobody is asked to stop, they exchange nothing. Then:

1. A rank that is asked to stop posts `stop` to the news of all ranks (`rank_news`).
2. Each rank that reads this writes to the store how many steps it has begun, n, and begins no other before it knows
   the decision. A thread does that: a rank that waits in a collective, for one that waits here, answers too.
3. When all have answered, rank 0 posts `stop-at` with the largest n + 1. No rank has begun that step's successor, and
   those that are behind have their steps up to there, in which all ranks still take part.

So the decision is the same on all ranks, at the same step, however far apart they are, and no rank waits for one that
waits for it. Rank 0 may serve the store, so it does not stop before all ranks have read the decision. A rank whose
program ends leaves its number of steps in the store: it has had all of its steps, and answers no more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.core.errors import OptionError, RankError
from penstock.core.ranks import Ranks
from penstock.core.signals.stop_signals import StopSignals
from penstock.distributed.rank_news import Message, RankNews, rank_news

_STOP, _STOP_AT = "stop", "stop-at"


class StopAgreement:
    """Agrees with all ranks on the step at which they stop.

    Args:
        news: of all ranks.
        timeout_s: how long to wait for the other ranks' answers.
    """

    def __init__(self, news: RankNews, timeout_s: float) -> None:
        self._news = news
        self._timeout_s = timeout_s
        self._begun = 0
        """Steps that `should_stop` has let begin."""
        self._stop_at: int | None = None
        self._all_know = False
        """Whether all ranks have read the decision, as far as rank 0 knows."""
        self._decision_key = ""
        self._is_over = False
        """Whether rank 0 has had all of its steps, so that there are no others to stop at."""
        self._key: str | None = None
        """Of the message that asks all ranks to stop, when this rank has read it: no step begins before `_stop_at`."""
        self._answers: dict[int, int] = {}
        """How many steps the ranks have begun, as far as rank 0 knows."""
        self._is_asked = False
        self._is_posted = False
        self._read = 0
        self._changed = threading.Condition()
        news.listen(self)
        news.wake()  # somebody may have asked already

    def ask(self) -> None:
        """Have all ranks stop soon. Signal handlers may call it."""
        if not self._is_asked:
            self._is_asked = True
            self._news.wake()

    def should_stop(self) -> bool:
        """Return whether to stop, once for each step, the same on all ranks.

        Raises:
            RankError: some ranks have not answered.
        """
        with self._changed:
            self._changed.wait_for(self.is_ready, self._timeout_s)
            if self._stop_at is None and not self.is_ready():
                raise RankError(self._why_undecided())
            if self._stop_at is not None and self._begun + 1 >= self._stop_at:
                return True
            self._begun += 1
            return False

    def is_ready(self) -> bool:
        """Return whether `should_stop` would return at once."""
        if self._key is None or self._is_over or self._news.is_lost:
            return True
        if self._stop_at is None:
            return False
        return self._begun + 1 < self._stop_at or self._news.rank != 0 or self._all_know

    def receive(self, message: Message) -> None:
        """Wait for `advance`, which reads the messages of before too."""

    def advance(self) -> bool:
        """Answer, and decide as rank 0; return whether there is no decision yet."""
        if self._is_asked and self._key is None and not self._is_posted:
            self._is_posted = self._news.post(_STOP, "") is not None
        for message in self._news.messages[self._read :]:
            self._read += 1
            self._take(message)
        if self._key is None:
            return False
        self._settle(self._key)
        with self._changed:
            self._changed.notify_all()
        return self._stop_at is None or not self._all_know

    def end(self) -> None:
        """Answer for good: the program ends."""
        self._news.call_store("set", _left(self._news.rank), str(self._begun))

    def _settle(self, key: str) -> None:
        call = self._news.call_store
        if self._news.rank != 0:
            self._all_know = True  # it is rank 0 that waits for the others
            self._is_over = self._stop_at is None and bool(call("check", [_left(0)]))
        elif self._stop_at is not None:
            self._all_know = (call("add", f"{self._decision_key}/heard", 0) or 0) >= self._news.world
        else:
            for rank in {*range(self._news.world)} - {*self._answers}:
                if (begun := self._answer(key, rank)) is not None:
                    self._answers[rank] = begun
            if len(self._answers) == self._news.world:
                self._news.post(_STOP_AT, str(max(self._answers.values()) + 1))

    def _answer(self, key: str, rank: int) -> int | None:
        """Return how many steps a rank had begun when it answered, or ended; None if it has done neither."""
        for place in (f"{key}/{rank}", _left(rank)):
            if self._news.call_store("check", [place]):
                return int(self._news.call_store("get", place) or 0)
        return None

    def _take(self, message: Message) -> None:
        if message.kind == _STOP and self._key is None:
            with self._changed:
                self._key = message.key
                begun = self._begun
            self._news.call_store("set", f"{message.key}/{self._news.rank}", str(begun))
        elif message.kind == _STOP_AT:
            with self._changed:
                self._stop_at, self._decision_key = int(message.text), message.key

    def _why_undecided(self) -> str:
        ranks = range(self._news.world)
        silent = [rank for rank in ranks if self._answer(str(self._key), rank) is None]
        return (
            f"a rank was asked to stop, and after {self._timeout_s:.0f} s there is no answer of the ranks {silent}; "
            "have all ranks call stop_requested() once in each step"
        )


def _left(rank: int) -> str:
    return f"penstock/left/{rank}"


_agreement: tuple[RankNews, StopAgreement] | None = None


def stop_agreement() -> StopAgreement | None:
    """Return the agreement of the ranks of `init_process_group`, the same for all loaders; None with one rank.

    Raises:
        OptionError: there are several ranks, without `init_process_group`.
    """
    global _agreement
    news = rank_news()
    if news is None:
        if not dist.is_initialized() and (world := Ranks.of(os.environ, os.getppid()).world_size) > 1:
            raise OptionError(
                f"{world} ranks can stop at the same step only if they can speak to each other; call "
                "torch.distributed.init_process_group before the first step"
            )
        return None
    if _agreement is None or _agreement[0] is not news:
        store: Any = _get_default_store()
        _agreement = (news, StopAgreement(news, store.timeout.total_seconds()))
    return _agreement[1]


class StopRequests:
    """Watches signals, and has all ranks stop at the same step.

    Args:
        signals: to watch.

    Raises:
        OptionError: see `StopSignals` and `stop_agreement`.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self._agreement: StopAgreement | None = stop_agreement()
        self._signals = StopSignals(signals, self._ask)

    def is_requested(self) -> bool:
        """Return whether to stop: once for each step, on all ranks."""
        self._agreement = stop_agreement()
        if self._agreement is None:
            return self._signals.noted
        if self._signals.noted:
            self._ask()
        return self._agreement.should_stop()

    def close(self) -> None:
        """Restore the signal handlers of before."""
        self._signals.close()

    def _ask(self) -> None:
        if self._agreement is not None:
            self._agreement.ask()
