"""Cutting: how a step cuts batches, and what it puts back. The options that all steps share, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypedDict

from torch import nn

from penstock.core.errors import OptionError
from penstock.memory.microbatch.batch_dims import BatchDims, Dims
from penstock.memory.microbatch.split import LayerNames, Split, count_samples, split_batch


class CuttingOptions(TypedDict, total=False):
    """The arguments of `Cutting`, for those that pass them on."""

    micro_batch: int | None
    split: Split | None
    batch_size: Callable[[Any], int] | None
    batch_dims: Dims | None
    also: Sequence[Any]
    allow_batch_dependent: LayerNames


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How batches are cut.

    Raises:
        OptionError: micro_batch is out of range, or how to cut was said in two ways.
    """

    micro_batch: int | None = None
    """The most samples at once to begin with; None for the whole batch."""
    split: Split | None = None
    batch_size: Callable[[Any], int] | None = None
    batch_dims: Dims | None = None
    """Which dimension of a batch's tensors has the samples."""
    also: Sequence[Any] = ()
    """What else to put back before another try."""
    allow_batch_dependent: LayerNames = ()
    """Layers that may see smaller micro-batches although their result depends on the samples in them."""
    cut: Split = field(init=False)
    """`(batch, parts) -> batches`."""
    count: Callable[[Any], int] = field(init=False)
    """`batch -> samples`."""

    @classmethod
    def of(cls, caller: str, options: CuttingOptions) -> Cutting:
        """Return what a class was given.

        Raises:
            TypeError: there is no such option.
            OptionError: micro_batch is out of range, or how to cut was said in two ways.
        """
        for name in options.keys() - CuttingOptions.__annotations__.keys():
            raise TypeError(f"{caller} has no argument {name!r}; it takes {', '.join(CuttingOptions.__annotations__)}")
        return cls(**options)

    def __post_init__(self) -> None:
        given: object = self.micro_batch
        if given is not None and not (isinstance(given, Integral) and int(given) >= 1):
            raise OptionError(f"micro_batch must be a number of samples, at least 1, or None, not {given!r}")
        cut, count = self.split or split_batch, self.batch_size or count_samples
        if self.batch_dims is not None:
            if self.split is not None or self.batch_size is not None:
                raise OptionError("batch_dims= says how to cut and count; pass it, or split= and batch_size=, not both")
            dims = BatchDims(self.batch_dims)
            cut, count = dims.split, dims.count
        object.__setattr__(self, "cut", cut)
        object.__setattr__(self, "count", count)

    @property
    def is_guessed(self) -> bool:
        """Whether nobody has said where the samples of a batch are."""
        return self.count is count_samples

    def modules_with(self, model: nn.Module) -> list[nn.Module]:
        """Return `model`, and the modules among `also`."""
        return [model, *(one for one in self.also if isinstance(one, nn.Module))]
