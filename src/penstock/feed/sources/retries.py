"""How often, and for how long, a request is made again that failed in a way that may pass."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from penstock.core.errors import OptionError

_FIRST_S = 0.1
_LONGEST_S = 10.0
_JITTER = random.SystemRandom()  # not the global one: users seed it, and forked workers would all wait alike


class TransientError(Exception):
    """A request that failed, and may succeed when it is made again: a cut connection, a server that is busy.

    Args:
        reason: what happened.
        wait_s: how long the server asked to be left alone.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """The bounds, and whether they are reached is what `Patience` counts."""

    most: int = 8
    """Requests for the same bytes after the first one."""

    timeout_s: float = 120.0
    """After the first failure, in all."""

    stall_s: float = 15.0
    """Silence of a server after which its connection is given up, which is a failure."""

    def __post_init__(self) -> None:
        if self.most < 0 or self.timeout_s <= 0 or self.stall_s <= 0:
            raise OptionError(
                f"retries={self.most} has to be 0 or more, timeout_s={self.timeout_s} and stall_s={self.stall_s} "
                "more than 0"
            )


class Patience:
    """Counts the failures of one thing that is wanted.

    >>> patience = Patience(Retries(most=1))
    >>> patience.wait_s(TransientError("503")) <= 0.1, patience.wait_s(TransientError("503"))
    (True, None)
    """

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self.failures = 0
        self._since = 0.0

    def wait_s(self, trouble: TransientError) -> float | None:
        """Count a failure; return how long to wait before the next attempt, or None if there is to be none.

        Waits grow twofold, and are drawn from the upper half of their span, so that readers that failed together do not
        come back together.
        """
        now = time.monotonic()
        if not self.failures:
            self._since = now
        self.failures += 1
        span = min(_FIRST_S * 2 ** min(self.failures - 1, 30), _LONGEST_S)
        wait_s = max(_JITTER.uniform(span / 2, span), min(trouble.wait_s, self._retries.timeout_s))
        if self.failures > self._retries.most or now + wait_s - self._since > self._retries.timeout_s:
            return None
        return wait_s

    def progress(self) -> None:
        """Forget the failures: what was wanted has begun to come."""
        self.failures = 0
