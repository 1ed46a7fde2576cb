"""A setting: the arguments that a search varies, and the line to paste for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

WorkerType = Literal["inline", "process", "thread"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to load. Settings with equal arguments are equal.

    Example:
        >>> Setting(workers=3, worker_type="process").line()
        'penstock.DataLoader(..., num_workers=3)'
        >>> Setting(workers=2, worker_type="thread", prefetch_factor=4).line()
        "penstock.DataLoader(..., num_workers=2, prefetch_factor=4, worker_type='thread')"
    """

    workers: int = 0
    """`num_workers`."""

    worker_type: WorkerType = "inline"
    """Where the dataset runs; "inline" without workers."""

    prefetch_factor: int = 2
    """The most batches in flight per worker."""

    pin_memory: bool = False
    """Whether slots are page-locked."""

    device: str | None = None
    """Where batches arrive, copied ahead; None to leave that to the loop."""

    def __post_init__(self) -> None:
        assert (self.workers == 0) == (self.worker_type == "inline")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `penstock.DataLoader` that differ from its defaults."""
        given: dict[str, Any] = {"num_workers": self.workers}
        if self.workers and self.prefetch_factor != 2:
            given["prefetch_factor"] = self.prefetch_factor
        if self.worker_type == "thread":
            given["worker_type"] = "thread"
        for name in ("pin_memory", "device"):
            if getattr(self, name):
                given[name] = getattr(self, name)
        return given

    def line(self) -> str:
        """Return the line to paste."""
        return f"penstock.DataLoader(..., {', '.join(f'{name}={value!r}' for name, value in self.arguments().items())})"

    def describe(self) -> str:
        """Return it as a short text.

        >>> Setting(workers=2, worker_type="process", prefetch_factor=4).describe()
        '2 processes, prefetch 4'
        """
        if self.worker_type == "inline":
            text = "no workers"
        else:
            kind = {"process": ("process", "processes"), "thread": ("thread", "threads")}[self.worker_type]
            text = f"{self.workers} {kind[self.workers > 1]}, prefetch {self.prefetch_factor}"
        text += ", pinned" if self.pin_memory else ""
        return text + (f", to {self.device}" if self.device else "")
