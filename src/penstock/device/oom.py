"""is_out_of_memory: whether an error is an out-of-memory. The one table of the messages of all libraries.

torch's allocators raise `torch.OutOfMemoryError`. Libraries below it report their own failed allocations as plain
RuntimeErrors, which are recognised by their status names. Any other error of an accelerator may have broken its context
for good ("sticky"), so none is taken for one that can be survived.
"""

from __future__ import annotations

import re

import torch

_CUDA_ERROR_MEMORY_ALLOCATION = 2

_STATUS_NAMES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # since cuDNN 9
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "CUFFT_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "MIOPEN_STATUS_ALLOC_FAILED",
)
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA driver error: out of memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL's
    "Cuda failure 'out of memory'",
    "Failed to CUDA calloc",
    "Failed to CUDA host alloc",
    "MPS backend out of memory",
)

_UNITS = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_SIZE = re.compile(r"ried to allocate (?P<number>[\d.]+) (?P<unit>bytes|[KMGT]iB)")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports that memory ran out, so that the same work may succeed in smaller parts.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_ERROR_MEMORY_ALLOCATION
    if type(error) is not RuntimeError and type(error).__name__ != "DistBackendError":
        return False
    text = str(error)
    return any(name in text for name in _STATUS_NAMES + _MESSAGES)


def requested_nbytes(error: BaseException) -> int | None:
    """Return the bytes of the allocation that failed; None if the message does not contain them.

    >>> requested_nbytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."))
    2147483648
    """
    found = _SIZE.search(str(error))
    return int(float(found["number"]) * (1 << _UNITS[found["unit"]])) if found else None
