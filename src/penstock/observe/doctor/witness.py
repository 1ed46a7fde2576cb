"""A look inside of a step: calls that wait for the device, and copies that cannot overlap.

Some steps run under a `TorchFunctionMode`, which sees what Python asks of tensors. What torch itself asks for (its
optimizers read step counters with `.item()`) is not the user's to change, and is not counted.
"""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from penstock.observe.examination import Call, StepLook

_READS_BACK = {
    torch.Tensor.item: ".item()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__bool__: "a tensor as a condition",
    torch.Tensor.nonzero: ".nonzero()",
}
NOT_THE_USERS = tuple({os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"], *site.getsitepackages()})
"""Where code lies that nobody wrote for this program."""

_OURS = str(Path(__file__).parents[2])

_Place = tuple[str, str, int]


class StepWitness:
    """Looks inside of the steps between `enter` and `leave`."""

    def __init__(self) -> None:
        self._steps = 0
        self._reads: dict[_Place, Counter[int]] = {}
        self._copies: dict[_Place, Counter[int]] = {}
        self._mode: _Mode | None = None

    def enter(self) -> None:
        """Begin to look at a step."""
        self._steps += 1
        self._mode = _Mode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Look no more; may be called at any time."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def look(self) -> StepLook:
        """Return what was seen: calls that were made in every step that was looked at."""
        return StepLook(steps=self._steps, reads_back=self._calls(self._reads), pageable=self._calls(self._copies))

    def _calls(self, seen: Mapping[_Place, Counter[int]]) -> tuple[Call, ...]:
        return tuple(
            Call(what=what, line=_line(file, number), per_step=sum(steps.values()) / self._steps)
            for (what, file, number), steps in seen.items()
            if len(steps) == self._steps
        )

    def read_back(self, what: str) -> None:
        """Note a call that reads a tensor back."""
        self._note(self._reads, what)

    def copied(self, what: str) -> None:
        """Note a copy that does not block, from memory that is not pinned."""
        self._note(self._copies, what)

    def _note(self, into: dict[_Place, Counter[int]], what: str) -> None:
        frame = _caller()
        if frame is not None:
            place = what, frame.f_code.co_filename, frame.f_lineno
            into.setdefault(place, Counter())[self._steps] += 1


class _Mode(TorchFunctionMode):
    def __init__(self, witness: StepWitness) -> None:
        super().__init__()
        self._witness = witness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = _READS_BACK.get(func)
        if what is not None and args and _is_read(func, args[0]):
            self._witness.read_back(what)
        if func is torch.Tensor.to and _is_pageable_copy(args, kwargs):
            self._witness.copied(".to(..., non_blocking=True)")
        return func(*args, **kwargs)


def _is_read(func: Any, tensor: torch.Tensor) -> bool:
    """Say whether a call waits for an accelerator, or would if its tensors were on one."""
    if func in (torch.Tensor.cpu, torch.Tensor.numpy):
        return tensor.device.type != "cpu"
    return tensor.device.type != "cpu" or not torch.accelerator.is_available()


def _is_pageable_copy(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    source = args[0]
    asked = kwargs.get("non_blocking", False) or (any(isinstance(one, bool) for one in args[2:3]) and bool(args[2]))
    return bool(asked) and source.device.type == "cpu" and not source.is_pinned()


def _caller() -> FrameType | None:
    """Return the frame that asked, when it is the user's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, torch.overrides.__file__)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(NOT_THE_USERS):
        return None
    return frame


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}:{number}: {text}" if text else f"{os.path.basename(file)}:{number}"
