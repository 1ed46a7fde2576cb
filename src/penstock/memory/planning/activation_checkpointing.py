"""checkpoint_blocks: the blocks of a model compute again in backward what they would else save.

This uses torch's non-reentrant `checkpoint`. While a block is computed again, BatchNorm does not count the batch a
second time. With `offload`, what is still saved (the inputs of the blocks) waits in host memory, by `save_on_cpu`. With
`selective`, the results of products, convolutions and attention are kept, and only the rest is computed again.
Sources: torch.utils.checkpoint, torch.autograd.graph.save_on_cpu.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_PRODUCTS = ("::mm", "::addmm", "::bmm", "::baddbmm", "::_scaled_mm", "::convolution", "::_scaled_dot_product_")
"""In the names of operations that take long for the bytes that they make."""

Saving = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context under which the inputs of a block are saved."""


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model, with their names: modules with children, in a ModuleList or Sequential.

    >>> layer = functools.partial(nn.TransformerEncoderLayer, 8, 2, 16)
    >>> [name for name, _ in blocks_of(nn.Sequential(nn.Embedding(5, 8), layer(), layer()))]
    ['1', '2']
    """
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for key, child in module.named_children():
            own = f"{name}.{key}" if name else key
            inside = any(own.startswith(f"{taken}.") for taken, _ in found)
            is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
            if (
                not inside
                and not is_list
                and any(True for _ in child.children())
                and any(True for _ in child.parameters())
            ):
                found.append((own, child))
    return found


def checkpoint_blocks(
    model: nn.Module, *, offload: bool = False, selective: bool = False, saving: Saving | None = None
) -> int:
    """Checkpoint the blocks of `model` from now on, in training; return how many there are.

    The model's parameters, buffers and their names stay as they are.

    Args:
        model: changed in place; blocks that are checkpointed already stay so.
        offload: whether the inputs of blocks wait in (pinned, where there is an accelerator) host memory.
        selective: whether the results of products, convolutions and attention are kept.
        saving: in place of torch's `save_on_cpu`.
    """
    blocks = blocks_of(model)
    if offload and saving is None:
        saving = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.accelerator.is_available())
    for _, block in blocks:
        forward = getattr(block.forward, "_penstock_forward", block.forward)
        block.forward = _Checkpointed(block, forward, saving, selective=selective)
    return len(blocks)


class _Checkpointed:
    """A block's forward. It is a class and not a closure, so that a model can still be copied and pickled."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], saving: Saving | None, *, selective: bool
    ) -> None:
        self._block = block
        self._penstock_forward = forward
        self._saving = saving
        self._selective = selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._block.training:
            return self._penstock_forward(*args, **kwargs)
        with self._saving() if self._saving is not None else contextlib.nullcontext():
            return checkpoint(
                self._penstock_forward,
                *args,
                use_reentrant=False,
                context_fn=functools.partial(_contexts, self._block, selective=self._selective),
                **kwargs,
            )


def _contexts(
    block: nn.Module, *, selective: bool
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    if not selective:
        return contextlib.nullcontext(), _preserving_statistics(block)
    first, again = create_selective_checkpoint_contexts(_keep_products)
    return first, _both(_preserving_statistics(block), again)


def _keep_products(_: object, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = any(word in operation.name() for word in _PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


@contextlib.contextmanager
def _preserving_statistics(block: nn.Module) -> Iterator[None]:
    """Run BatchNorm layers on copies of their statistics, so that a batch that is computed again counts once.

    To compute without statistics would save other tensors than the first time, which checkpointing does not allow.
    """
    layers = [layer for layer in block.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    kept = [dict(layer._buffers) for layer in layers]
    try:
        for layer, buffers in zip(layers, kept, strict=True):
            layer._buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})
        yield
    finally:
        for layer, buffers in zip(layers, kept, strict=True):
            layer._buffers.update(buffers)
