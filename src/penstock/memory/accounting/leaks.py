"""watch_leaks: finds tensors that outlive their step, and the line of the program that made them.

Every storage that an operation makes is recorded with the step and with the line of the user's program that ran the
operation. Its finalizer removes it, so it does not matter what holds it: a list, or the graph of a loss that was added
to a total. A line leaks if its storages grow in number step by step, and none that was old ever died. A queue of the
last losses does not leak: its oldest die. Nor does a cache that is full. What is in the state of an optimizer (made
when a parameter has its first gradient), in a queue with a largest length, or in a list whose last places are still
None, will stop growing, and is left out.

After backward a graph holds no tensors any more, but it still grows where losses are added to a total. So the graphs of
live tensors are followed back: autograd numbers its nodes, and each step records the number that was reached.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.core.units import size_text
from penstock.memory.model_tensors import state_tensors, storage_key
from penstock.memory.user_lines import is_users, line_text

_OLD_STEPS = 3
"""Steps after which a tensor has outlived its own."""
_MIN_STEPS = 3
"""A leak has survivors of at least this many steps."""

Line = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Tensors that survive step after step."""

    line: str
    """Where they were made: "train.py:31: loss = criterion(model(x), y)"."""

    tensors: int
    """How many have outlived their step."""

    nbytes: int
    """Bytes that they hold."""

    steps: int
    """How many different steps they are from."""

    keeps_graph: bool
    """Whether some of them require grad, and so hold what their backward would need."""

    held_by: str
    """What refers to them, if it is a Python object: "a list of 12"."""

    is_chain: bool = False
    """Whether the leak is one graph that each step makes longer, rather than tensors."""

    def __str__(self) -> str:
        if self.is_chain:
            return (
                f"{self.line}: its graph reaches back over {self.steps} steps, and grows with each; add up "
                "loss.item() or loss.detach() instead"
            )
        count = f"{self.tensors} tensors ({size_text(self.nbytes)}) of {self.steps} steps are alive"
        held = f", held by {self.held_by}" if self.held_by else ""
        advice = "; they keep their graph: keep loss.item() or loss.detach() instead" if self.keeps_graph else ""
        return f"{self.line}: {count}{held}{advice}"


@dataclass(slots=True, eq=False)
class _Born:
    line: Line
    step: int
    nbytes: int


@dataclass(slots=True)
class _History:
    alive: dict[int, _Born] = field(default_factory=dict)
    died_old: int = 0


class watch_leaks(TorchDispatchMode):  # noqa: N801  used as a statement
    """Watches a training loop for tensors that survive steps.

    Each operation takes some microseconds longer, so watch some tens of steps, not a whole run.

    Example:
        >>> losses = []
        >>> weight = torch.ones(3, requires_grad=True)
        >>> with watch_leaks() as leaks:
        ...     for _ in range(8):
        ...         losses.append((weight * 2).sum())
        ...         leaks.step()
        >>> [(leak.steps > 3, leak.held_by, leak.keeps_graph) for leak in leaks.found()][-1]
        (True, 'a list of 8', True)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = 0
        self._known: set[int] = set()
        self._lines: dict[Line, _History] = {}
        self._written: dict[int, Line] = {}
        """The line that last wrote to a storage that is part of a graph."""
        self._leaf = torch.zeros((), requires_grad=True)
        self._last_nodes: list[int] = []
        """The number of the last graph node of each step."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler for the first operation, which takes seconds

    def step(self) -> None:
        """Mark the end of a step."""
        self._step += 1
        with torch.enable_grad():
            node = self._leaf.view(()).grad_fn
        if node is not None:  # there is none in inference mode
            self._last_nodes.append(node._sequence_nr())

    def found(self) -> list[Leak]:
        """Return the leaks so far, the largest first."""
        gc.collect()
        leaks, bounded = [], _bounded_storages()
        for line, history in self._lines.items():
            alive = ((key, born) for key, born in history.alive.items() if key not in bounded)
            old = {key: born for key, born in alive if born.step <= self._step - _OLD_STEPS}
            steps = {born.step for born in old.values()}
            if len(steps) < _MIN_STEPS or history.died_old or not _is_recent(steps, self._step - _OLD_STEPS):
                continue
            holders = _tensors_on(set(old))
            leaks.append(
                Leak(
                    line=line_text(*line),
                    tensors=len(old),
                    nbytes=sum(born.nbytes for born in old.values()),
                    steps=len(steps),
                    keeps_graph=any(tensor.grad_fn is not None for tensor in holders),
                    held_by=_held_by(holders),
                )
            )
        lines = {leak.line for leak in leaks}
        leaks += [chain for chain in self._growing_graphs() if chain.line not in lines]
        return sorted(leaks, key=lambda leak: (-leak.nbytes, leak.line))

    def _growing_graphs(self) -> Iterator[Leak]:
        """Yield the graphs that have grown over at least half of the steps, each line once."""
        born = {key: one for history in self._lines.values() for key, one in history.alive.items()}
        reported: set[Line] = set()
        for tensor in _all_tensors():
            if tensor.grad_fn is None:
                continue
            key = storage_key(tensor)
            line = self._written.get(key)
            if line is None and key in born and born[key].step >= self._step - _OLD_STEPS:
                line = born[key].line
            if line is None or line in reported:
                continue
            steps = {step for step in self._steps_in(tensor) if step <= self._step - _OLD_STEPS}
            if len(steps) < max(_MIN_STEPS, (self._step - _OLD_STEPS) / 2):
                continue
            reported.add(line)
            yield Leak(
                line=line_text(*line),
                tensors=1,
                nbytes=tensor.untyped_storage().nbytes(),
                steps=len(steps),
                keeps_graph=True,
                held_by=_held_by([tensor]),
                is_chain=True,
            )

    def _steps_in(self, tensor: Tensor) -> set[int]:
        """Return the steps that the nodes of a tensor's graph are from."""
        seen, todo, steps = set(), [tensor.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            steps.add(bisect.bisect_left(self._last_nodes, node._sequence_nr()))
            todo += [before for before, _ in node.next_functions]
        return steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        line: Line | None = None
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    line = line or _users_line()
                    self._record(storage, line)
        if func._schema.is_mutable and torch.is_grad_enabled() and isinstance(args[0], Tensor) and args[0].ndim == 0:
            self._written[storage_key(args[0])] = _users_line()
        return result

    def _record(self, storage: torch.UntypedStorage, line: Line) -> None:
        key = storage._cdata
        self._known.add(key)
        self._written.pop(key, None)
        born = _Born(line, self._step, storage.nbytes())
        self._lines.setdefault(line, _History()).alive[key] = born
        weakref.finalize(storage, self._forget, key, born).atexit = False

    def _forget(self, key: int, born: _Born) -> None:
        self._known.discard(key)
        history = self._lines[born.line]
        del history.alive[key]
        history.died_old += self._step - born.step >= _OLD_STEPS


def _users_line() -> Line:
    """Return the innermost line of the user's program."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _bounded_storages() -> set[int]:
    """Return the storages that are held by what fills up, and then grows no further."""
    found: list[Any] = []
    for one in gc.get_objects():
        kind = type(one)
        if issubclass(kind, Optimizer):
            found += state_tensors(one)
        elif (issubclass(kind, deque) and one.maxlen is not None) or (kind is list and one and one[-1] is None):
            found += tree_leaves([_parts(item) for item in list(one)])  # at once: other threads may add to it
    return {storage_key(one) for one in found if isinstance(one, Tensor)}


def _parts(item: Any) -> Any:
    if not is_dataclass(item) or isinstance(item, type):
        return item
    return [getattr(item, one.name, None) for one in fields(item)]  # those with slots have no __dict__


def _tensors_on(storages: set[int]) -> list[Tensor]:
    """Return the tensors on these storages that Python refers to."""
    return [tensor for tensor in _all_tensors() if tensor.untyped_storage()._cdata in storages]


def _all_tensors() -> list[Tensor]:
    return [
        one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter) and one.layout is torch.strided
    ]


def _is_recent(steps: set[int], now: int) -> bool:
    """Return whether the last survivor is no older than the longest gap between survivors."""
    ordered = sorted(steps)
    return now - ordered[-1] <= max(after - before for before, after in itertools.pairwise(ordered))


def _held_by(tensors: list[Tensor]) -> str:
    """Return a text about the container that refers to most of `tensors`."""
    counts: Counter[str] = Counter()
    for tensor in itertools.islice(tensors, 100):
        for holder in gc.get_referrers(tensor):
            if isinstance(holder, (list, tuple, dict, set)) and holder is not tensors:
                counts[_holder_text(holder)] += 1
    return counts.most_common(1)[0][0] if counts else ""


def _holder_text(holder: Any) -> str:
    return f"a {type(holder).__name__} of {len(holder)}"
