"""Images and videos decoded on a GPU: by torchvision (nvJPEG) and torchcodec (NVDEC), in the thread that asks for them.

where       in the training process only: a forked worker cannot use CUDA, and a thread has a current stream of its
            own, of which the loop knows nothing. In any worker it is refused
order       the pixels lie in memory of torch's allocator, taken on the current stream of the calling thread, and
            are complete for what is submitted to that stream from then on, as of any function of torch
before      the current stream is waited for before anything is decoded: torchvision's decoder writes on a stream of
            its own, and nvJPEG's hardware on none, to memory that kernels of the current stream may still read
            (pytorch/vision#9606, meta-pytorch/torchcodec#1634)
not there   what nvJPEG cannot decode (other formats, CMYK, what it refuses) is decoded on the host and copied

The pixels are not those of the host's decoders: nvJPEG and NVDEC round otherwise.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import get_worker_info

from penstock.core.errors import ExtraError, OptionError


def decoding_device(device: str | int | torch.device, module: str) -> torch.device | None:
    """Return the GPU that `device=` of a source names, where `module` decodes; None for the host.

    Raises:
        OptionError: it is something else, or torch sees no GPU.
        ExtraError: the module is missing.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={device!r} is no device of torch: {error}") from error
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise OptionError(f"device={device!r}: samples are decoded on 'cpu' or on 'cuda'")
    if not torch.cuda.is_available():
        raise OptionError(f"device={device!r} needs a GPU, and torch {torch.__version__} sees none; leave device= out")
    library(module)
    return found


def begin_on(device: torch.device) -> None:
    """Check that this thread may decode on `device`, and wait until nothing uses memory that is free on its stream.

    Raises:
        OptionError: it is a worker.
    """
    if get_worker_info() is not None or threading.current_thread().name.startswith("penstock-worker-"):
        raise OptionError(
            f"samples of a source with device='{device}' are decoded in the training process, on the stream of its "
            "loop, and this is a worker; use num_workers=0, or open the source without device="
        )
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def library(module: str) -> Any:
    """Return the module that decodes.

    Raises:
        ExtraError: it cannot be imported.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise ExtraError(
            f"{package} is needed to decode with device='cuda', and cannot be imported; install the release of "
            f"{package} that was built for torch {torch.__version__} and CUDA ({error})"
        ) from error
