"""Who is called when the program forks: a forked process sees the slots that its parent holds, and may read them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from penstock.core.walking import walk


class Forkable(Protocol):
    """Whoever has memory that forked processes see, too. Python calls it in the thread that forks."""

    def before_fork(self) -> None:
        """Note in the parent what the process that comes may read."""
        ...

    def after_fork_in_child(self) -> None:
        """Give up, in the forked process, what is the parent's."""
        ...


watched: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _before_fork() -> None:
    for forkable in walk(watched):
        forkable.before_fork()


def _after_fork_in_child() -> None:
    for forkable in walk(watched):
        forkable.after_fork_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
