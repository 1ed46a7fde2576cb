"""Which lines of a step contribute to its gradients.

A line does if it computes a tensor that requires gradients, or one of which such a tensor is computed later in the
step: a teacher's outputs do, a histogram of the gradients does not. So do lines that change tensors of which gradients
are computed in another step, such as a queue of keys, and all lines that call such a line.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from penstock.observe.doctor.probes.source_lines import line_text

_Line = tuple[str, int]
_FROM_PYTHON = frozenset({torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer})
_READS = frozenset(
    {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero"}
    | {"__array__", "__float__", "__int__", "__index__", "__bool__", "__contains__"}
)
"""Functions that make values of Python's or NumPy's of tensors."""
_SHARES = frozenset({"numpy", "__array__"})
"""Those of them that share a tensor's memory."""
_VIEWS = 8
"""Of the same memory."""
_VIEWED_NUMBERS = 1 << 24
"""Of tensors that are larger it is not looked at what NumPy writes to them."""


class _Outside(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    memory: int
    requires_grad: bool
    is_parameter: bool


class _Made(NamedTuple):
    tensor: Any
    lines: frozenset[_Line]
    """The lines that contribute to it."""
    is_from_python: bool
    """Whether values of Python's or NumPy's do."""
    outside: frozenset[_Outside] = frozenset()
    """The tensors from outside of the step that do."""
    is_outside: bool = False
    """Whether it is a view of one of them."""


class _Viewed(NamedTuple):
    """A tensor that NumPy shares the memory of, and may write to."""

    tensor: torch.Tensor
    before: torch.Tensor
    version: int
    lines: frozenset[_Line]


class TrainingLines:
    """Follows the tensors of one step at a time."""

    def __init__(self) -> None:
        self._training: set[_Line] = set()
        self._made: dict[int, _Made] = {}
        self._observed: set[_Line] = set()
        self._read: set[_Line] = set()
        """Lines whose tensors become values of Python's or NumPy's."""
        self._outside: list[list[weakref.ref[torch.Tensor]]] = []
        """Of each step, tensors that gradients depend on and no observed operation of it has made: kept ones, and those
        of `torch.from_numpy`."""
        self._contributing: dict[int, weakref.ref[torch.Tensor]] = {}
        self._contributing_memory: set[int] = set()
        self._changed_memory: dict[int, set[_Line]] = {}
        """The lines that change what no operation of their step has made, by where it is in memory."""
        self._averages: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[_Line]]] = {}
        """Tensors that the step before has made of parameters, and the lines that did."""
        self._averaging: set[_Line] = set()
        """The lines that make tensors of parameters and of what they made in the step before."""
        self._depends_on_python = False
        self._numbers: dict[tuple[_Line, str, int], tuple[float, ...]] = {}
        """Those that operations got, by line, function and how many of them came before in the step."""
        self._turns: Counter[tuple[_Line, str]] = Counter()
        self._sizes: set[float] = set()
        self._changes_otherwise = False
        """Whether NumPy writes into tensors, or numbers of an optimizer differ between steps."""
        self._rates: dict[int, list[tuple[Any, ...]]] = {}
        self._viewed: dict[int, list[_Viewed]] = {}
        """By where they are in memory."""
        self.updates = False
        """Whether a step was seen to change parameters."""

    def begin_step(self, batch: Any) -> None:
        """Forget the tensors of the step before; this one gets `batch`."""
        self._turns.clear()
        self._sizes = {size for one in _tensors(batch) for size in one.shape}
        self._made = {id(one): _Made(one, frozenset(), False) for one in _tensors(batch)}

    def end_step(self) -> None:
        """Let go of a step's tensors."""
        averages = [
            (weakref.ref(one.tensor), one.lines)
            for one in self._made.values()
            if any(other.is_parameter for other in one.outside)
        ]
        self._made.clear()
        self._averages = {id(made): (one, lines) for one, lines in averages if (made := one()) is not None}
        self.note_use([one.tensor for views in self._viewed.values() for one in views])
        self._viewed.clear()
        self._outside.append(list(self._contributing.values()))
        self._contributing.clear()

    def note(
        self,
        calling: tuple[_Line, ...],
        operands: Iterable[Any],
        made: Any,
        changed: Any = None,
        *,
        func: Callable[..., Any] | None = None,
    ) -> bool:
        """Note that a line computed `made` of `operands`, and perhaps `changed` one of them.

        `calling` are that line and those that called it, innermost first. Returns whether values of Python's that
        differ between steps, or what the step before has made of parameters, have part in it.
        """
        self._observed.add(calling[0])
        known, outside = self._origins(operands)
        lines = frozenset(calling).union(*(one.lines for one in known))
        outside = outside.union(*(one.outside for one in known))
        has_averages = False
        for used in outside:
            average, made_by = self._averages.get(id(used.tensor()), (None, frozenset[_Line]()))
            if average is not None and average() is used.tensor():
                self._averaging |= made_by | lines
                has_averages = True
        is_from_python = func in _FROM_PYTHON or self._has_values(calling[0], func, operands)
        is_from_python |= any(one.is_from_python for one in known)
        is_gradient = getattr(func, "__self__", None) is torch.Tensor.grad  # which the backward pass made
        tensors = [] if is_gradient else _tensors((made, changed))
        if getattr(func, "__name__", "") in _READS:
            self._read |= lines
        if getattr(func, "__name__", "") in _SHARES:
            self._view(operands, lines)
        if any(one.requires_grad for one in tensors):
            self._contribute(lines, outside)
            self._depends_on_python |= is_from_python
        else:
            places = {one.memory for one in outside if one.memory}
            for one in tensors:
                is_outside = _memory(one) in places or any(
                    other.is_outside and _memory(other.tensor) == _memory(one) for other in known
                )
                self._made[id(one)] = _Made(one, lines, is_from_python, outside, is_outside)
                self._sizes.update(one.shape)
        self.note_use(changed, is_over=True)
        for one in _tensors(changed):
            if id(one) not in self._made or self._made[id(one)].is_outside:
                self._changed_memory.setdefault(_memory(one), set()).update(lines)
                self._averaging |= lines if any(kept.is_parameter for kept in outside) else frozenset()
        return is_from_python or has_averages

    @property
    def changed_memory(self) -> Collection[int]:
        """Where the tensors from outside of their step lie that steps change."""
        return self._changed_memory.keys()

    def note_use(self, operands: Any, *, is_over: bool = False) -> None:
        """Note that an operation is to use these: what NumPy has changed of them was done for training.

        What the operation itself changes of them was not, once it `is_over`.
        """
        if not self._viewed:
            return
        for memory in {_memory(one) for one in _tensors(operands)} & self._viewed.keys():
            for place, one in enumerate(self._viewed[memory]):
                if not is_over and one.tensor._version == one.version and not torch.equal(one.tensor, one.before):
                    self._training |= one.lines
                    self._changes_otherwise = True
                now = one.tensor.clone(), one.tensor._version
                self._viewed[memory][place] = _Viewed(one.tensor, *now, one.lines)

    def _view(self, operands: Iterable[Any], lines: frozenset[_Line]) -> None:
        for one in _tensors(operands):
            if one.is_inference():
                continue
            if one.device.type != "cpu" or one.numel() > _VIEWED_NUMBERS:
                self._depends_on_python |= one.device.type == "cpu"  # perhaps
                continue
            seen = self._viewed.setdefault(_memory(one), [])
            if len(seen) < _VIEWS:
                seen.append(_Viewed(one.detach(), one.detach().clone(), one._version, lines))

    def note_training(self, calling: tuple[_Line, ...], operands: Iterable[Any] = (), *, updates: bool = False) -> None:
        """Note a line that computes gradients, or changes parameters by `operands`, and those that call it."""
        self.updates |= updates
        if updates:
            self.note_use(operands, is_over=True)
        known, outside = self._origins(operands)
        self._training |= frozenset(calling).union(*(one.lines for one in known))
        self._depends_on_python |= any(one.is_from_python for one in known)
        self._contributing_memory.update(one.memory for one in outside.union(*(one.outside for one in known)))

    def _origins(self, operands: Iterable[Any]) -> tuple[list[_Made], frozenset[_Outside]]:
        """Return what is known of operands that this step has made, and which others there are."""
        tensors = _tensors(operands)
        known = [self._made[id(one)] for one in tensors if id(one) in self._made]
        others = [one for one in tensors if id(one) not in self._made]
        return known, frozenset(
            _Outside(weakref.ref(one), _memory(one), one.requires_grad, one.requires_grad and one.is_leaf)
            for one in others
        )

    def _contribute(self, lines: Iterable[_Line], outside: Iterable[_Outside]) -> None:
        self._training.update(lines)
        for one in outside:
            self._contributing_memory.add(one.memory)
            if not one.requires_grad:
                self._contributing.setdefault(id(one.tensor), one.tensor)

    def _has_values(self, line: _Line, func: Callable[..., Any] | None, operands: Any) -> bool:
        """Return whether an operation gets arrays, or numbers that differ from those in the step before.

        The sizes of tensors differ by batch.
        """
        leaves = [part for one in tree_leaves(operands) for part in _parts(one)]
        numbers = [float(one) for one in leaves if isinstance(one, int | float) and not isinstance(one, bool)]
        key = line, getattr(func, "__name__", "")
        place = *key, self._turns[key]
        self._turns[key] += 1
        before = self._numbers.setdefault(place, tuple(numbers))
        differs = before != tuple(numbers) and not all(abs(one) in self._sizes for one in numbers)
        return differs or any(isinstance(one, np.ndarray | np.generic) for one in leaves)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the learning rates, and other numbers, with which parameters are updated."""
        groups = [
            tuple(value for name, value in group.items() if name != "params" and isinstance(value, int | float | tuple))
            for group in optimizer.param_groups
        ]
        self._changes_otherwise |= self._rates.setdefault(id(optimizer), groups) != groups

    @property
    def has_values_of_python(self) -> bool:
        """Whether training may depend on what Python or NumPy computes in a step."""
        return self._changes_otherwise or self.takes_values

    @property
    def takes_values(self) -> bool:
        """Whether tensors that gradients depend on may be made of what Python or NumPy computes in a step."""
        gone = any(one() is None for step in self._outside[:-1] for one in step)
        kept = [{id(one) for one in step} for step in self._outside]
        return self._depends_on_python or gone or any(one != kept[0] for one in kept)  # as of a list that grows

    def observed(self) -> tuple[str, ...]:
        """Return the lines in which torch computes what no value of Python's is made of."""
        return tuple(sorted(line_text(*line) for line in self._observed - self._read))

    def keeping(self) -> tuple[str, ...]:
        """Return the lines that change tensors from outside of their step, and those that call them."""
        return tuple(sorted(line_text(*line) for line in set[_Line]().union(*self._changed_memory.values())))

    def averaging(self) -> tuple[str, ...]:
        """Return the lines that keep what they make of parameters, and go on with it, and those that call them."""
        return tuple(sorted(line_text(*line) for line in self._averaging))

    def texts(self) -> tuple[str, ...]:
        """Return the lines that contribute, and those that call them."""
        changing = (self._changed_memory.get(one, set()) for one in self._contributing_memory)
        return tuple(sorted(line_text(*line) for line in self._training.union(*changing)))


def _memory(one: torch.Tensor) -> int:
    """Return where a tensor's values are; 0 where it has no memory of its own."""
    return one.untyped_storage().data_ptr() if one.layout is torch.strided else 0


def _parts(one: Any) -> tuple[Any, ...]:
    return (one.start, one.stop, one.step) if isinstance(one, slice) else (one,)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
