"""Which loaders penstock's iterator cannot run: they get torch's."""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess

from torch.utils.data import IterDataPipe, MapDataPipe

from penstock.core.errors import OptionError
from penstock.loader.config import LoaderConfig


def why_torch_iterator(config: LoaderConfig) -> str:
    """Return why a loader with these arguments runs on torch's iterator; empty if it runs on penstock's.

    Raises:
        OptionError: an argument of penstock's own needs penstock's iterator.
    """
    reason = _reason(config)
    needed = [
        name
        for name, is_used in (
            ("device", config.arrives_on_device),
            ("errors", config.errors != "raise"),
            ("seed", config.seed is not None),
            ("worker_type", config.worker_type != "process"),
        )
        if is_used
    ]
    if reason and needed:
        raise OptionError(f"{needed[0]}= needs penstock's iterator, which cannot run here: {reason}; leave it out")
    return reason


def _reason(config: LoaderConfig) -> str:
    if isinstance(config.dataset, (IterDataPipe, MapDataPipe)):
        return "legacy DataPipes shard and shuffle through torch's iterator"
    if not hasattr(os, "register_at_fork"):
        return "this system has no socket pairs"
    if config.shares_memory:
        process = getattr(config.context, "Process", None)
        if not (isinstance(process, type) and issubclass(process, BaseProcess)):
            name = getattr(process, "__name__", repr(process))
            return f"Process of its multiprocessing context is {name}, which is no process"
    return ""
