"""Tensors that a program keeps of step after step, as `penstock.watch_leaks` finds them in some steps."""

from __future__ import annotations

from penstock.memory.accounting.leaks import watch_leaks
from penstock.observe.doctor.step_results import KeptTensors

LEAST_STEPS, MOST_STEPS = 9, 24
"""Of losses that are added up over a few batches before their backward pass, more steps tell that they do not last."""


class LeakWatch:
    """Watches the steps between `enter` and `leave`."""

    def __init__(self) -> None:
        self._leaks: watch_leaks | None = watch_leaks()
        self._is_entered = False
        self.steps = 0
        """How many were watched."""

    def enter(self) -> None:
        """Begin to watch a step."""
        if self._leaks is not None:
            self._is_entered = True
            self._leaks.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """End it; may be called at any time."""
        if self._is_entered and self._leaks is not None:
            self._is_entered = False
            self._leaks.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._leaks.step()
            self.steps += 1

    def result(self) -> tuple[KeptTensors, ...]:
        """Return what outlived its step, the largest first, and forget it; nothing where too few steps were watched."""
        self.leave()
        leaks, self._leaks = self._leaks, None
        if leaks is None or self.steps < LEAST_STEPS:
            return ()
        return tuple(
            KeptTensors(
                line=one.line,
                step_nbytes=one.nbytes // max(1, one.steps),
                steps=one.steps,
                has_graph=one.keeps_graph,
                is_chain=one.is_chain,
                held_by=one.held_by,
            )
            for one in leaks.found()
        )
