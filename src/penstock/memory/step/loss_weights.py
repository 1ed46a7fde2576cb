"""LossWeights: what the losses of a batch's parts have to be multiplied by to add up to the loss of the whole batch.

Frameworks let a model compute its loss, and most losses are means: over samples, over the labels that are not -100, or
over those that are left when the first of each sequence has no prediction. Others are sums that were divided already,
by the tokens of all batches between two steps. Which it is cannot be read off a batch. So a part of the first batch
that has to be cut is run whole and cut once more, and what gives the same gradients stays. If none does, samples are
coupled in another way, and the batch is not cut. As long as several give the same, they are compared again where they
differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.memory.microbatch.cutting import Cutting
from penstock.memory.microbatch.split import arrays_of
from penstock.memory.recovery.attempt import MAX_TRIES, attempt
from penstock.memory.step.cut_check import CutCheck, CutChecker
from penstock.memory.step.micro_batch_runner import MicroBatchRunner

Weight = Callable[[Any], Any]
"""`batch -> number`: how many items the loss of a batch is the mean of."""
_IGNORED = -100
"""The label that torch's losses leave out by default."""
_NEGLIGIBLE = 1e-6


class CutRefusedError(Exception):
    """A batch must not be cut; why."""


_Rule = Callable[[Any], tuple[Weight, bool]]
"""From a batch: what counts its items and those of its parts, and whether its loss is a sum."""


class LossWeights:
    """Finds the shares of parts.

    Args:
        model: whose gradients are compared.
        optimizer: whose parameters' gradients are compared too.
        weight: what the loss is a mean of, or "sum", if that was said.
        backward: computes the gradients of a loss.
        cutting: how batches are cut. Gradients are not compared where layers may depend on the other samples.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        weight: Weight | Literal["sum"] | None,
        backward: Callable[[Tensor], object],
        cutting: Cutting,
    ) -> None:
        self._model, self._optimizer, self._backward, self._cutting = model, optimizer, backward, cutting
        count_samples, is_checked = cutting.count, not cutting.allow_batch_dependent
        self._is_said = weight is not None
        rules: dict[str, _Rule] = {
            "samples": lambda batch: (count_samples, False),
            "sum": lambda batch: (count_samples, True),
            "labels": lambda batch: (_label_counter(batch, 0) or count_samples, False),
            "labels but the first": lambda batch: (_label_counter(batch, 1) or count_samples, False),
        }
        if callable(weight):
            rules = {"weight=": lambda batch: (weight, False)}
        self._rules = {"sum": rules["sum"]} if weight == "sum" else rules
        self._is_left = is_checked
        """Whether no cut has been checked so far."""
        self._told_apart = 0.0 if is_checked else float("inf")
        """The largest difference of shares that a check has not told apart."""

    def shares(self, batch: Any, parts: Sequence[Any], see_loss: Callable[[Any], Tensor]) -> list[float]:
        """Return what to multiply the loss of each part by.

        Args:
            batch: the whole.
            parts: of the batch.
            see_loss: computes the loss of a part, with its graph.

        Raises:
            CutRefusedError: the batch must not be cut.
        """
        if len(parts) == 1:
            return [1.0]
        if self._is_left or self._ambiguity(batch, parts) > max(_NEGLIGIBLE, 1.5 * self._told_apart):
            self._check(batch, parts, see_loss)
        return _shares(next(iter(self._rules.values())), batch, parts)

    def _ambiguity(self, batch: Any, parts: Sequence[Any]) -> float:
        """Return by how much the rules that are left differ about the shares of these parts."""
        first, *others = (_shares(rule, batch, parts) for rule in self._rules.values())
        return max((abs(a - b) for other in others for a, b in zip(first, other, strict=True)), default=0.0)

    def _check(self, batch: Any, parts: Sequence[Any], see_loss: Callable[[Any], Tensor]) -> None:
        """Keep the rules under which a piece that fits has the gradients of its parts."""
        size, cut = self._cutting.count(batch), self._cutting.cut
        pieces = cut(batch, max(1, min(len(parts), size // 2)))
        piece = max(pieces, key=lambda one: self._ambiguity(one, cut(one, 2)))
        checks: dict[str, CutCheck] = {}
        for name, rule in self._rules.items():
            check = self._check_rule(rule, piece, see_loss)
            if check is None:
                if not self._is_said:
                    raise CutRefusedError(
                        "two samples do not fit, so whether the loss is a sum or a mean, and of what, could not be "
                        'tried; pass weight= (what it is a mean of, or "sum")'
                    )
                self._is_left = False
                return
            checks[name] = check
        least = min(checks.values(), key=lambda check: check.largest)
        within = max(4 * least.largest, least.tolerance / 100)
        kept = [name for name, check in checks.items() if check.is_same and check.largest <= within]
        if not kept:
            raise CutRefusedError(f"{least}; or the loss is a mean of something else: pass weight=")
        self._rules = {name: self._rules[name] for name in kept}
        self._is_left = False
        self._told_apart = self._ambiguity(piece, cut(piece, 2))
        if self._ambiguity(batch, parts) > max(_NEGLIGIBLE, 4 * self._told_apart):
            raise CutRefusedError(f"the loss may be a mean of {' or of '.join(kept)}, which differ here; pass weight=")
        self._told_apart = max(self._told_apart, self._ambiguity(batch, parts))

    def _check_rule(self, rule: _Rule, piece: Any, see_loss: Callable[[Any], Tensor]) -> CutCheck | None:
        """Return None where it does not fit."""
        count, is_sum = rule(piece)

        def loss_fn(model: nn.Module, part: Any) -> tuple[Tensor, Any]:
            weight = float(count(part))
            loss = see_loss(part)
            return loss if is_sum else loss * weight, weight

        runner = MicroBatchRunner(
            self._model,
            loss_fn,
            Cutting(
                split=lambda batch, parts: [part for part in self._cutting.cut(batch, parts) if count(part)],
                batch_size=self._cutting.count,
                also=self._cutting.also,
            ),
        )
        checker = CutChecker(runner, self._optimizer, None, self._backward)
        tries = (attempt(functools.partial(checker.check, piece)).value for _ in range(MAX_TRIES))
        return next(filter(None, tries), None)


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
