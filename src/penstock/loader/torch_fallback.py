"""Where torch's own iterator runs: for worker processes on systems that lack what penstock's are made of.

Penstock's worker processes need sockets that deliver whole messages and pass descriptors, files without a name, and
hooks of a fork: Linux. On macOS and Windows a loader with worker processes runs torch's iterator: the batches are the
same, and what only penstock's workers can do is refused. Inline loading and threads need nothing of that.
"""

from __future__ import annotations

import os
import socket

from penstock.core.errors import OptionError
from penstock.loader.config import LoaderConfig

REASON = "torch's own iterator runs, because penstock's worker processes need Linux"


def needs_torch(config: LoaderConfig) -> bool:
    """Return whether this loader has worker processes, on a system that cannot run penstock's."""
    return config.shares_memory and not (
        hasattr(os, "register_at_fork")
        and hasattr(socket, "MSG_CMSG_CLOEXEC")
        and (hasattr(os, "memfd_create") or hasattr(os, "O_TMPFILE"))
    )


def check_torch_can(config: LoaderConfig) -> None:
    """Raise OptionError if an argument asks for what torch's iterator cannot do."""
    asked = {
        "errors": config.errors != "raise",
        "keep_batch_size": config.keep_batch_size,
        "seed": config.seed is not None,
        "device": config.arrives_on_device,
        "distributed": config.is_distributed,
        "pin_memory": not isinstance(config.pin_memory, (bool, str)),
    }
    refused = [f"{name}=" for name, is_asked in asked.items() if is_asked]
    if refused:
        raise OptionError(
            f"{', '.join(refused)} cannot be had with worker processes on this system, because penstock's need Linux; "
            "use num_workers=0 or worker_type='thread'"
        )
