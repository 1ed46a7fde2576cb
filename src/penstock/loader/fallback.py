"""Which loaders penstock's iterator cannot run: they get torch's, whose batches are the same.

Penstock's worker processes need sockets that deliver whole messages and pass descriptors, files without a name, and
hooks of a fork: Linux. On macOS and Windows a loader with worker processes falls back; inline loading and threads need
nothing of that.
"""

from __future__ import annotations

import os
import socket
from multiprocessing.process import BaseProcess

from penstock.core.errors import OptionError
from penstock.loader.config import LoaderConfig


def why_torch_iterator(config: LoaderConfig) -> str:
    """Return why a loader with these arguments runs on torch's iterator; empty if it runs on penstock's.

    Raises:
        OptionError: an argument of penstock's own needs penstock's iterator.
    """
    reason = _reason(config)
    if not reason:
        return ""
    asked = {
        "worker_type": config.worker_type != "process",
        "errors": config.errors != "raise",
        "keep_batch_size": config.keep_batch_size,
        "seed": config.seed is not None,
        "device": config.arrives_on_device,
        "distributed": config.is_distributed,
        "pin_memory": not isinstance(config.pin_memory, (bool, str)),
    }
    needed = [f"{name}=" for name, is_asked in asked.items() if is_asked]
    if needed:
        raise OptionError(
            f"{', '.join(needed)} cannot be had with torch's iterator, which runs this loader because {reason}; leave "
            "it out, or change that"
        )
    return reason


def _reason(config: LoaderConfig) -> str:
    if config.is_datapipe:
        return "legacy DataPipes shard and shuffle through torch's iterator"
    if not config.shares_memory:
        return ""
    if not _has_linux_parts():
        return "penstock's worker processes need Linux (num_workers=0 and worker_type='thread' do not)"
    process = getattr(config.context, "Process", None)
    if not (isinstance(process, type) and issubclass(process, BaseProcess)):
        name = getattr(process, "__name__", repr(process))
        return f"Process of its multiprocessing context is {name}, which is no process"
    return ""


def _has_linux_parts() -> bool:
    return (
        hasattr(os, "register_at_fork")
        and hasattr(socket, "MSG_CMSG_CLOEXEC")
        and (hasattr(os, "memfd_create") or hasattr(os, "O_TMPFILE"))
    )
