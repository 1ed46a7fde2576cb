"""Evaluations that run with gradients on: the graphs that they make, and whether they keep those of all batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from penstock.core.object_attributes import attributes_of
from penstock.observe.doctor.probes.frame_variables import variables_of
from penstock.observe.doctor.probes.steps.growing_containers import measure_held
from penstock.observe.doctor.step_results import EvaluationGraph
from penstock.observe.doctor.thresholds import THRESHOLDS

_AFTER = (1, 2)
"""How many batches a loop has handled when it is looked at."""


class EvaluationGraphs:
    """Looks at the variables of loops over other loaders than the examined one, between their batches."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, str], dict[int, int]] = {}

    def look(self, dataset: str, length: int, frames: Sequence[FrameType], batches: int) -> None:
        """Look at a loop that has handled so many batches, where gradients are on and a model is evaluated.

        Args:
            dataset: the class of the loader's dataset.
            length: how many batches it has.
            frames: the functions of the program that run, innermost first.
            batches: how many it has handled.
        """
        if batches not in _AFTER or not frames or not torch.is_grad_enabled():
            return
        frame = frames[0]
        variables = variables_of(frame)
        if not any(not module.training for module in _modules(variables)):
            return
        for name, value in variables.items():
            tensors = value[-8:] if type(value) is list else [value]
            graphs = [one for one in tensors if issubclass(type(one), torch.Tensor) and one.grad_fn is not None]
            # nothing is held any more where gradients were computed: that was a training
            nbytes = measure_held(graphs).nbytes - sum(measure_held(one.detach()).nbytes for one in graphs)
            if graphs and nbytes > 0:
                self._held.setdefault((dataset, length, name), {})[batches] = nbytes

    def result(self) -> EvaluationGraph | None:
        """Return the evaluation that keeps the most with each of its batches; None where none keeps much."""
        first, second = _AFTER
        found = [
            EvaluationGraph(dataset=dataset, batches=batches, name=name, batch_nbytes=held[second] - held.get(first, 0))
            for (dataset, batches, name), held in self._held.items()
            if second in held and first in held
        ]
        most = max(found, key=lambda one: one.batch_nbytes, default=None)
        return most if most is not None and most.batch_nbytes >= THRESHOLDS.kept_graph_nbytes else None


def _modules(variables: dict[str, Any]) -> Iterator[torch.nn.Module]:
    """Yield the modules among the variables of a function, and those of the object that it is a method of."""
    attributes = attributes_of(variables.get("self"))
    for value in (*variables.values(), *attributes.values()):
        if issubclass(type(value), torch.nn.Module):
            yield value
