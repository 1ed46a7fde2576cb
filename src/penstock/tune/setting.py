"""A setting: what is tried, and the line that a person pastes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Body = Literal["inline", "process", "thread"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to load; settings compare equal when they are the same way.

    Example:
        >>> Setting(workers=3, body="process").line()
        'penstock.DataLoader(..., num_workers=3)'
        >>> Setting(workers=2, body="thread", prefetch_factor=4).line()
        "penstock.DataLoader(..., num_workers=2, prefetch_factor=4, workers='thread')"
    """

    workers: int = 0
    """`num_workers`."""

    body: Body = "inline"
    """What runs the dataset; "inline" without workers."""

    prefetch_factor: int = 2
    """Batches under way for each worker, at most."""

    pin_memory: bool = False
    """Whether slots are page-locked."""

    device: str | None = None
    """Where batches arrive, copied ahead; None to leave that to the loop."""

    ring_bytes: int | None = None
    """The most that batches under way and held may occupy; None for the loader's own bound."""

    def __post_init__(self) -> None:
        assert (self.workers == 0) == (self.body == "inline")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `penstock.DataLoader` that differ from what it does by itself."""
        given: dict[str, Any] = {"num_workers": self.workers}
        if self.workers and self.prefetch_factor != 2:
            given["prefetch_factor"] = self.prefetch_factor
        if self.body == "thread":
            given["workers"] = "thread"
        for name in ("pin_memory", "device", "ring_bytes"):
            if getattr(self, name):
                given[name] = getattr(self, name)
        return given

    def line(self) -> str:
        """Return what to paste."""
        return f"penstock.DataLoader(..., {', '.join(f'{name}={value!r}' for name, value in self.arguments().items())})"

    def words(self) -> str:
        """Return it in a few words.

        >>> Setting(workers=2, body="process", prefetch_factor=4).words()
        '2 processes, prefetch 4'
        """
        if self.body == "inline":
            words = "no workers"
        else:
            kind = {"process": ("process", "processes"), "thread": ("thread", "threads")}[self.body]
            words = f"{self.workers} {kind[self.workers > 1]}, prefetch {self.prefetch_factor}"
        words += ", pinned" if self.pin_memory else ""
        return words + (f", to {self.device}" if self.device else "")
