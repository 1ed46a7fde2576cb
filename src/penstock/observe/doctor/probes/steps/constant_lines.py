"""Which lines of a step compute the same in every step, of nothing that a step gets or learns.

What a line computes is constant if no tensor of the batch, no parameter, and nothing that is made of them goes into it,
and if its values are the same in every observed step. A function is constant if all that torch computes in it is: then
its other lines, which make lists and arrays of Python's and NumPy's, are as well.
"""

from __future__ import annotations

import itertools
import statistics
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from penstock.core.object_attributes import has_attributes, values_of
from penstock.observe.doctor.probes.frame_variables import variables_of

_Line = tuple[str, int]

_PLAIN = (int, float, str, bytes, torch.dtype, torch.device, FunctionType, ModuleType, type, type(None))
"""What has no tensors of a batch in it."""
_LOOKED_AT = 64
_NEVER_THE_SAME = itertools.count()

_MOST_NUMBERS = 1 << 24
"""Larger results are not compared, and count as changing."""


class ConstantLines:
    """Compares what lines compute in one step with what they computed in the steps before."""

    def __init__(self) -> None:
        self._steps = 0
        self._is_in_step = False
        self._depends: dict[int, weakref.ref[torch.Tensor]] = {}
        self._made: dict[_Line, list[int]] = {}
        self._first: dict[_Line, list[int]] = {}
        self._changing: set[_Line] = set()
        self._codes: dict[CodeType, set[_Line]] = {}
        self._takes_more: set[CodeType] = set()
        """Functions with variables that may depend on the batch without a tensor."""
        self._is_opaque = False
        """Whether a batch has parts of which it is not known what tensors they have."""
        self._seconds: list[dict[_Line, float]] = []

    def begin_step(self, batch: Any) -> None:
        """Begin a step that gets `batch`."""
        self._end_step()
        self._steps, self._is_in_step = self._steps + 1, True
        self._seconds.append({})
        self._depends = {}
        self._note_dependent(batch)
        for part in tree_leaves(batch):
            if not issubclass(type(part), (torch.Tensor, np.ndarray, *_PLAIN)):
                if has_attributes(part):
                    self._note_dependent(values_of(part))
                else:  # it keeps its values elsewhere
                    self._is_opaque = True

    def note(self, frame: FrameType, operands: Iterable[Any], made: Any, seconds: float) -> None:
        """Note that the line at which a function is computed `made` of `operands`, and how long it took."""
        line = frame.f_code.co_filename, frame.f_lineno
        if not any(isinstance(one, torch.Tensor) for one in tree_leaves(made)):
            return
        self._seconds[-1][line] = self._seconds[-1].get(line, 0.0) + seconds
        self._codes.setdefault(frame.f_code, set()).add(line)
        if not all(map(self._is_plain, variables_of(frame).values())):
            self._takes_more.add(frame.f_code)
        if any(map(self._is_dependent, tree_leaves(operands))) or any(map(self._is_dependent, tree_leaves(made))):
            self._changing.add(line)
            self._note_dependent(made)
        elif line not in self._changing:
            self._made.setdefault(line, []).append(_digest(made))

    def lines(self) -> dict[str, set[int]]:
        """Return the lines that are constant, by file; none before two steps were observed."""
        self._end_step()
        if self._steps < 2 or self._is_opaque:
            return {}
        found: dict[str, set[int]] = {}
        for code, own in self._codes.items():
            constant = own - self._changing
            for file, number in constant:
                found.setdefault(file, set()).add(number)
            if constant == own and code not in self._takes_more:
                numbers = {number for _, _, number in code.co_lines() if number is not None}
                found.setdefault(code.co_filename, set()).update(numbers)
        return found

    def fraction(self) -> float:
        """Return what torch computes at these lines, of the time that it computes in a step: the median of the steps.

        An operator is not a call, so a look at where the program is may come as late as the next call.
        """
        constant = self.lines()
        fractions = [
            sum(seconds for (file, line), seconds in step.items() if line in constant.get(file, ()))
            / sum(step.values())
            for step in self._seconds
            if step
        ]
        return statistics.median(fractions) if fractions else 0.0

    def _end_step(self) -> None:
        if self._is_in_step and self._steps == 1:
            self._first = self._made
        elif self._is_in_step:
            both = self._first.keys() | self._made.keys()
            self._changing |= {line for line in both if self._first.get(line) != self._made.get(line)}
        self._made, self._is_in_step = {}, False

    def _is_dependent(self, one: Any) -> bool:
        if not isinstance(one, torch.Tensor):
            return False
        known = self._depends.get(id(one))
        return one.requires_grad or (known is not None and known() is one)

    def _is_plain(self, value: Any) -> bool:
        """Return whether the value of a variable is known not to come from the batch."""
        if isinstance(value, torch.Tensor):
            return not self._is_dependent(value)
        if isinstance(value, list | tuple):
            return all(map(self._is_plain, value[:_LOOKED_AT]))
        return issubclass(type(value), (*_PLAIN, torch.nn.Module))

    def _note_dependent(self, tree: Any) -> None:
        for one in tree_leaves(tree):
            if isinstance(one, torch.Tensor):
                self._depends[id(one)] = weakref.ref(one)


def _digest(made: Any) -> int:
    """Return a number that is the same for the same values; for what is too large, another each time."""
    parts: list[Any] = []
    for one in tree_leaves(made):
        if not isinstance(one, torch.Tensor):
            parts.append(repr(one)[:100])
        else:
            parts.append((str(one.dtype), tuple(one.shape), _bytes_of(one)))
    return hash(tuple(parts))


def _bytes_of(one: torch.Tensor) -> object:
    """Return the values, or something else each time, where they are too many or are not there to be read."""
    if one.layout is not torch.strided or one.numel() > _MOST_NUMBERS:
        return next(_NEVER_THE_SAME)
    try:
        # NumPy gets a copy: a storage that it has seen cannot be resized any longer.
        values = one.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        return values.view(-1).view(torch.uint8).numpy().tobytes()
    except Exception:  # a tensor of torch.func, a fake one, one of several devices
        return next(_NEVER_THE_SAME)
