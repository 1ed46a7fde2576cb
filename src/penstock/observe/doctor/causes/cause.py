"""The seam of causes: what `diagnose` asks of each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.finding import Finding

_Value = TypeVar("_Value")


class Cause(Protocol):
    """One thing that makes a loop slow, fail or take memory.

    `diagnose` asks every cause once per diagnosis, in the main thread, in the order of `registry.CAUSES`. A cause only
    reads the frozen measurements: it touches no loader, file or clock, so the same measurements always give the same
    findings. It does not raise; where measurements leave it open whether the cause applies, it returns None.
    """

    @property
    def name(self) -> str:
        """The name of its finding, as in "cold-reads"."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of `Measurements` that it needs; it is not asked while one of them is None."""

    def find(self, measured: Measurements, /) -> Finding | None:
        """Return what was found, or None where the cause does not apply or a change would gain nothing."""


@dataclass(frozen=True, slots=True)
class FunctionCause:
    """A cause made of one function; `cause` is its decorator."""

    name: str
    needs: tuple[str, ...]
    find: Callable[[Measurements], Finding | None]


def cause(name: str, *needs: str) -> Callable[[Callable[[Measurements], Finding | None]], FunctionCause]:
    """Make a cause of a function from measurements to a finding.

    Args:
        name: of its finding.
        *needs: the fields of `Measurements` without which it is not asked.
    """

    def decorate(find: Callable[[Measurements], Finding | None]) -> FunctionCause:
        return FunctionCause(name, needs, find)

    return decorate


def ask(one: Cause, measured: Measurements) -> Finding | None:
    """Return what a cause finds; None where a measurement that it needs is missing."""
    return None if any(getattr(measured, need) is None for need in one.needs) else one.find(measured)


def required(value: _Value | None) -> _Value:
    """Return a measurement that a cause named in `needs`, as its type without None."""
    assert value is not None
    return value
