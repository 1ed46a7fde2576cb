"""How often, and for how long, a failed request is repeated."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from penstock.core.errors import OptionError
from penstock.core.urls import redact

_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 10.0
_JITTER = random.SystemRandom()  # not the global one: users seed it, and forked workers would all wait alike


class TransientError(Exception):
    """A request failed, and may succeed when it is repeated: a cut connection, a server that is busy."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        self.reason = redact(reason)
        super().__init__(self.reason)
        self.wait_s = wait_s
        """The server's Retry-After."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """The limits that `RetryBudget` enforces: options of `Storage`, which says what they are."""

    max_retries: int = 8
    timeout_s: float = 120.0
    stall_s: float = 15.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.timeout_s <= 0 or self.stall_s <= 0:
            raise OptionError(
                f"retries={self.max_retries} has to be 0 or more, timeout_s={self.timeout_s} and "
                f"stall_s={self.stall_s} more than 0"
            )


class RetryBudget:
    """Counts the failures of one request.

    >>> budget = RetryBudget(Retries(max_retries=1))
    >>> budget.wait_s(TransientError("503")) <= 0.1, budget.wait_s(TransientError("503"))
    (True, None)
    """

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self.failures = 0
        self._since = 0.0

    def wait_s(self, error: TransientError) -> float | None:
        """Count a failure; return how long to wait before the next attempt, or None if the limits are reached.

        Waits double, and are drawn from the upper half of their range, so that readers that failed together do not
        retry together.
        """
        now = time.monotonic()
        if not self.failures:
            self._since = now
        self.failures += 1
        limit_s = min(_FIRST_WAIT_S * 2 ** min(self.failures - 1, 30), _MAX_WAIT_S)
        wait_s = max(_JITTER.uniform(limit_s / 2, limit_s), min(error.wait_s, self._retries.timeout_s))
        if self.failures > self._retries.max_retries or now + wait_s - self._since > self._retries.timeout_s:
            return None
        return wait_s

    def progress(self) -> None:
        """Reset the count: bytes have arrived."""
        self.failures = 0
