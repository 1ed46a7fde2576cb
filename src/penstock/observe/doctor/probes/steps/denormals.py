"""Tensors of a step that have denormal numbers, with which processors compute tens of times more slowly."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from penstock.observe.doctor.probes.source_lines import line_text
from penstock.observe.doctor.step_results import StepCall

_Line = tuple[str, int]
_LEAST, _MOST = 32, 1 << 22
"""Numbers of a tensor that is looked at: a few are soon computed, and a look at very many takes long."""


class Denormals:
    """Counts them in what torch's functions return, in the observed steps."""

    def __init__(self) -> None:
        self._fractions: dict[_Line, dict[int, float]] = defaultdict(dict)
        """Of each line, the largest fraction of its tensors' numbers in each step."""

    def note(self, made: Any, line: _Line | None, step: int) -> None:
        """Note what a function of torch's `made` for a line."""
        if line is None or type(made) is not torch.Tensor or not made.is_floating_point():
            return
        if made.device.type != "cpu" or made.layout is not torch.strided or not _LEAST <= made.numel() <= _MOST:
            return
        values = made.detach().abs()
        fraction = float(((values < torch.finfo(made.dtype).tiny) & (values > 0)).float().mean())
        self._fractions[line][step] = max(fraction, self._fractions[line].get(step, 0.0))

    def result(self, steps: int, least: float) -> tuple[StepCall, ...]:
        """Return the lines that have made at least the fraction `least` of them in each of so many steps."""
        found = {line: min(of_steps.values()) for line, of_steps in self._fractions.items() if len(of_steps) == steps}
        largest = sorted((line for line in found if found[line] >= least), key=lambda line: -found[line])
        return tuple(StepCall(what="numbers", line=line_text(*line), per_step=found[line]) for line in largest)
