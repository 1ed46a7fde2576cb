"""LossWeights: what the losses of a batch's parts have to be multiplied by to add up to the loss of the whole batch.

Frameworks let a model compute its loss, and most losses are means: over samples, over the labels that are not -100, or
over those that are left when the first of each sequence has no prediction. Others are sums that were divided already,
by the tokens of all batches between two steps. Which it is cannot be read off a batch. So a part of the first batch
that has to be cut is run whole and cut once more, and what gives the same gradients stays. If none does, samples are
coupled in another way, and the batch is not cut. As long as several give the same, they are compared again where they
differ. Where not even two samples fit, the graph of a part's loss has to tell (`loss_reduction.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.memory.cutting.cut_check import CutCheck, gradient_comparison
from penstock.memory.cutting.cut_policy import CutRefusedError
from penstock.memory.cutting.loss_reduction import reduction_of
from penstock.memory.cutting.micro_batch import Cutting
from penstock.memory.cutting.split import arrays_of
from penstock.memory.recovery.snapshot import Snapshot

Weight = Callable[[Any], Any]
"""`batch -> number`: how many items the loss of a batch is the mean of."""
_IGNORED = -100
"""The label that torch's losses leave out by default."""
_NEGLIGIBLE = 1e-6


_Rule = Callable[[Any], tuple[Weight, bool]]
"""From a batch: what counts its items and those of its parts, and whether its loss is a sum."""


class LossWeights:
    """Finds the shares of parts. It is what `CutPolicy` compares batches by.

    Args:
        model: whose gradients are compared.
        optimizer: whose parameters' gradients are compared too.
        weight: what the loss is a mean of, or "sum", if that was said.
        backward: computes the gradients of a loss.
        cutting: how batches are cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        weight: Weight | Literal["sum"] | None,
        backward: Callable[[Tensor], object],
        cutting: Cutting,
    ) -> None:
        self._backward, self._cutting = backward, cutting
        self._snapshot = Snapshot(model, optimizer, cutting.also, copies_all=True)
        count_samples = cutting.size_of
        rules: dict[str, _Rule] = {
            "samples": lambda batch: (count_samples, False),
            "sum": lambda batch: (count_samples, True),
            "labels": lambda batch: (_label_counter(batch, 0) or count_samples, False),
            "labels but the first": lambda batch: (_label_counter(batch, 1) or count_samples, False),
        }
        if callable(weight):
            rules = {"weight=": lambda batch: (weight, False)}
        self._rules = {"sum": rules["sum"]} if weight == "sum" else rules
        self._is_compared = False
        self._told_apart = 0.0
        """The largest difference of shares that a comparison has not told apart."""
        self._see_loss: Callable[[Any], Tensor] | None = None

    @contextlib.contextmanager
    def seeing(self, see_loss: Callable[[Any], Tensor]) -> Iterator[None]:
        """Let the loss of a part, with its graph, be computed by `see_loss` meanwhile."""
        self._see_loss = see_loss
        try:
            yield
        finally:
            self._see_loss = None

    def is_due(self, batch: Any, parts: Sequence[Any]) -> bool:
        """Return whether no batch was compared, or this one differs where those that were did not."""
        return not self._is_compared or self._ambiguity(batch, parts) > max(_NEGLIGIBLE, 4 * self._told_apart)

    def compare(self, piece: Any) -> CutCheck | str:
        """Keep the rules under which a piece has the gradients of its parts; return what is best of them."""
        checks = {name: self._check_rule(rule, piece) for name, rule in self._rules.items()}
        known = {name: one for name, one in checks.items() if isinstance(one, CutCheck)}
        if not known:
            return next(str(one) for one in checks.values())
        least = min(known.values(), key=lambda check: check.largest)
        within = max(4 * least.largest, least.tolerance / 100)
        kept = [name for name, check in known.items() if check.is_same and check.largest <= within]
        if kept:
            self._rules = {name: self._rules[name] for name in kept}
            self._is_compared = True
            cut = self._cutting.cut(piece, 2)
            self._told_apart = max(self._told_apart, self._ambiguity(piece, cut))
        return least

    def shares(self, batch: Any, parts: Sequence[Any]) -> list[float]:
        """Return what to multiply the loss of each part by.

        Raises:
            CutRefusedError: the loss is another one than `weight=` says.
        """
        if len(parts) == 1:
            return [1.0]
        if not self._is_compared and self._see_loss is not None:
            for part in parts:
                self._read_graph(self._see_loss(part), batch, part)
                if self._ambiguity(batch, parts) <= _NEGLIGIBLE:
                    break
        return _shares(next(iter(self._rules.values())), batch, parts)

    def _ambiguity(self, batch: Any, parts: Sequence[Any]) -> float:
        """Return by how much the rules that are left differ about the shares of these parts."""
        first, *others = (_shares(rule, batch, parts) for rule in self._rules.values())
        return max((abs(a - b) for other in others for a, b in zip(first, other, strict=True)), default=0.0)

    def _read_graph(self, loss: Tensor, batch: Any, part: Any) -> None:
        """Keep the rules that agree with how a part's loss was reduced, where its graph says so."""
        found = reduction_of(loss)
        if found is None:
            return
        kept = {name: rule for name, rule in self._rules.items() if rule(batch)[1] != found.is_mean}
        if not kept and "weight=" in self._rules:
            raise CutRefusedError('weight= says that the loss is a mean, and it is a sum; pass weight="sum"')
        if not kept:
            raise CutRefusedError('weight="sum" says that the loss is a sum, and it is a mean; say of what by weight=')
        counts = {name: float(rule(batch)[0](part)) for name, rule in kept.items()}
        exact = {name: rule for name, rule in kept.items() if found.items == counts[name]}
        self._rules = exact or kept

    def _check_rule(self, rule: _Rule, piece: Any) -> CutCheck | str:
        count, is_sum = rule(piece)
        see_loss = self._see_loss
        assert see_loss is not None

        def compute_loss(part: Any) -> tuple[Tensor, Any]:
            weight = float(count(part))
            loss = see_loss(part)
            return loss if is_sum else loss * weight, weight

        cutting = Cutting(
            split=lambda batch, parts: [part for part in self._cutting.cut(batch, parts) if count(part)],
            batch_size=self._cutting.count,
        )
        return gradient_comparison(cutting, self._snapshot, compute_loss, self._backward).compare(piece)


def _shares(rule: _Rule, batch: Any, parts: Sequence[Any]) -> list[float]:
    count, is_sum = rule(batch)
    if is_sum:
        return [1.0] * len(parts)
    counts = [float(count(part)) for part in parts]
    total = sum(counts)
    return [one / total for one in counts] if total else [1 / len(parts)] * len(parts)


def _label_counter(batch: Any, first: int) -> Weight | None:
    """Return what counts the labels of a batch and of its parts; None where none is left out.

    Args:
        batch: whose labels are the first integers among which -100 is.
        first: how many of each sequence have no prediction.
    """
    for number, one in enumerate(arrays_of(batch)):
        labels = torch.from_numpy(one) if isinstance(one, np.ndarray) else one
        if labels.dtype in (torch.int64, torch.int32) and bool((labels == _IGNORED).any()):
            return functools.partial(_count_labels, number=number, first=first)
    return None


def _count_labels(part: Any, number: int, first: int) -> int:
    labels = list(arrays_of(part))[number]
    return int((labels[:, first:] != _IGNORED).sum()) if labels.ndim > 1 else int((labels != _IGNORED).sum())
