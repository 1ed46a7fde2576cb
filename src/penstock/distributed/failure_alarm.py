"""FailureAlarm: when the loader of one rank fails, all others raise instead of waiting in their next collective.

The rank that fails posts its error to the news of all ranks (`rank_news`), and waits until the others have heard of it:
when it ends, torchrun ends them, a tenth of a second later.
"""

from __future__ import annotations

import sys
import threading
import time

from penstock.core.errors import RankError
from penstock.distributed.rank_news import POLL_S, Message, RankNews, rank_news

_KIND = "failure"

_HEARD_S = POLL_S + 1.0
"""How long a rank that fails waits for the others; one that iterates over nothing does not listen."""


class FailureAlarm:
    """Signals a failure to all ranks, and receives theirs.

    Args:
        news: of all ranks.
    """

    def __init__(self, news: RankNews) -> None:
        self._news = news
        self._received: str | None = None
        self._closing = threading.Event()
        news.listen(self)

    def signal(self, error: BaseException) -> None:
        """Let all ranks know that this one's loader has failed, and wait until they do."""
        if self._received is not None:
            return
        text = f"the loader of rank {self._news.rank} failed: {type(error).__name__}: {error}"
        key = self._news.post(_KIND, text)
        deadline = time.monotonic() + _HEARD_S
        while key is not None and time.monotonic() < deadline:
            heard = self._news.call_store("add", f"{key}/heard", 0)
            if heard is None or heard >= self._news.world or self._closing.wait(0.02):
                return

    def check(self) -> None:
        """Raise if a rank has signalled.

        Raises:
            RankError: its loader has failed.
        """
        if self._received is not None:
            raise RankError(f"{self._received}; no rank can continue without it")

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._news.leave(self)

    def receive(self, message: Message) -> None:
        """Note another rank's failure."""
        if message.kind != _KIND or self._received is not None:
            return
        self._received = message.text
        if message.rank != self._news.rank:
            # The training loop may be waiting in a collective, and never come back for another batch.
            sys.stderr.write(f"penstock: rank {self._news.rank} has received: {message.text}\n")

    def advance(self) -> bool:
        """Wait for nothing."""
        return False

    def end(self) -> None:
        """Leave nothing."""


def start_failure_alarm() -> FailureAlarm | None:
    """Return a listening alarm; None with one rank, or without `init_process_group`."""
    news = rank_news()
    return FailureAlarm(news) if news is not None else None
