"""Out-of-memory is recognised in the words of every library, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from penstock.device.oom import is_out_of_memory

_DistBackendError = type("DistBackendError", (RuntimeError,), {})


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "CUDA driver error: out of memory",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `x`",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `x`",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_an_out_of_memory_is_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def test_nccls_own_is_recognised_in_the_error_of_the_process_group() -> None:
    text = "NCCL Error 1: unhandled cuda error\nCuda failure 2 'out of memory'"
    assert is_out_of_memory(_DistBackendError(text))
    assert not is_out_of_memory(_DistBackendError("NCCL Error 1: unhandled cuda error\nCuda failure 700"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        ValueError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ],
)
def test_another_error_is_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
