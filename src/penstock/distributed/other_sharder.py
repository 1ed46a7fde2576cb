"""`is_shared_out_by_another`: whether what asks a stream for samples shares them out over ranks by itself."""

from __future__ import annotations

import sys
from types import FrameType

_SHARE_OUT = {
    ("accelerate.data_loader", "DataLoaderDispatcher"): False,  # the first rank reads, and sends the others theirs
    ("accelerate.data_loader", "IterableDatasetShard"): True,
    ("transformers.trainer_pt_utils", "IterableDatasetShard"): True,
}
"""Classes by their module and name, and whether every rank of theirs reads all samples and drops the others' own."""


def is_shared_out_by_another() -> tuple[bool, bool]:
    """Return whether such an object is calling, and whether each of its ranks reads all samples.

    These wrap a dataset or its loader without telling it (Accelerate's `prepare`, Hugging Face's Trainer). They are
    found among the callers; a worker process that was forked has those of the training process, too.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name in ("__iter__", "__len__") else None
        for kind in type(caller).__mro__ if caller is not None else ():
            found = _SHARE_OUT.get((kind.__module__, kind.__name__))
            if found is not None:
                return True, found
        frame = frame.f_back
    return False, False
