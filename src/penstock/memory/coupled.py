"""Layers whose result for one sample depends on the other samples of its micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Allowed = Sequence[str | type[nn.Module]]
"""Classes, their names, or qualified names of modules ("layer1.0.bn2")."""


def coupled_layers(model: nn.Module, allowed: Allowed = ()) -> list[tuple[str, nn.Module]]:
    """Return the layers, with their names, that normalise over the batch as they are now, but those in `allowed`.

    >>> [name for name, _ in coupled_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))]
    ['1']
    >>> coupled_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), allowed=["BatchNorm1d"])
    []
    """
    classes = tuple(one for one in allowed if isinstance(one, type))
    names = {one for one in allowed if isinstance(one, str)}
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.training
        and not isinstance(layer, classes)
        and not {name, type(layer).__name__} & names
    ]


def coupled_words(coupled: list[tuple[str, nn.Module]]) -> str:
    """Return why a batch with such layers is not cut, and how to allow it."""
    name, layer = coupled[0]
    kind = type(layer).__name__
    more = f" and {len(coupled) - 1} more" if len(coupled) > 1 else ""
    return (
        f"{kind} ({name!r}{more}) computes over the samples of a micro-batch, so smaller ones give another result; "
        f"allow it with batch_coupled=({kind!r},), or use a batch that fits"
    )
