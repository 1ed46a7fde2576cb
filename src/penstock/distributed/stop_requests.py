"""StopRequests: whether this process, or another rank, has got a signal to stop."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.signals.stop_signals import StopSignals
from penstock.distributed.stop_agreement import StopAgreement, stop_agreement


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
