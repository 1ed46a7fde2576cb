"""Measures the parts of one loader, one after another, each with its fraction of the time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.measurement_log import MeasurementLog
from penstock.observe.doctor.measurements import Settings
from penstock.observe.doctor.probes.copy_on_write import measure_copy_on_write
from penstock.observe.doctor.probes.sample_cost import SampleProbe
from penstock.observe.doctor.probes.transport_cost import measure_transport_s
from penstock.observe.doctor.probes.worker_noise import measure_worker_noise

_SAMPLES, _TRANSPORT, _COPY_ON_WRITE = 0.6, 0.14, 0.18
"""Fractions of the time; what is left is for collating, and for starting workers."""

_LEAST_COPY_ON_WRITE_S, _NOISE_S = 0.6, 1.5
_TRANSFERS = 5


def measure_parts(
    loader: DataLoader[Any], own: Settings, batch: Any, seconds: float, log: MeasurementLog
) -> dict[str, Any]:
    """Return the results of the probes that apply to a loader, by their fields of `Measurements`.

    Args:
        loader: whose dataset, collate function and workers are measured.
        own: its arguments.
        batch: one of the loader's.
        seconds: the time of all of them.
        log: takes a note of what could not be measured.
    """
    # A dataset may use the accelerator, and CUDA cannot be used in a forked child once its parent has used it.
    forks = own.start_method == "fork" and not torch.accelerator.is_available()
    found: dict[str, Any] = {}
    if forks:
        for_child_s = max(_LEAST_COPY_ON_WRITE_S, seconds * _COPY_ON_WRITE)
        found["copy_on_write"] = log.attempt(
            "a worker's memory", lambda: measure_copy_on_write(loader, for_child_s), for_child_s + 1.0
        )
    probe = SampleProbe(loader, seconds * _SAMPLES)
    log.attempt("samples in this process", probe.run, seconds * _SAMPLES)
    found["samples"] = log.attempt("what samples cost", probe.costs, 2.0)
    found["image_decode"] = probe.image_decode()
    if not probe.samples and not probe.error:
        log.add("samples in this process: not one was made in time; a sample takes very long")
    if probe.error:
        log.add(f"samples in this process: {probe.error}")
    if probe.samples and own.num_workers:
        found["transport_s"] = log.attempt(
            "transport",
            lambda: measure_transport_s(loader, probe.samples, seconds * _TRANSPORT),
            seconds * _TRANSPORT + 4.0,
        )
    if forks and not own.is_iterable:  # last, because a dataset that was used here may hang in workers
        found["worker_noise"] = log.attempt(
            "the random numbers of workers", lambda: measure_worker_noise(loader), _NOISE_S, least_s=_NOISE_S
        )
    found["transfer_s"] = log.attempt(
        "copying a batch to the device", lambda: _transfer_s(batch, is_pinned=own.pin_memory), 2.0
    )
    return found


def _transfer_s(batch: Any, *, is_pinned: bool) -> float | None:
    """Return the median seconds to copy `batch` to the accelerator, from pinned memory or not; None without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if device is None or not tensors:
        return None
    if is_pinned:
        tensors = [tensor.pin_memory() for tensor in tensors]
    taken_s = []
    for _ in range(_TRANSFERS):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for tensor in tensors:
            tensor.to(device)
        torch.accelerator.synchronize()
        taken_s.append(time.perf_counter() - began)
    return sorted(taken_s)[_TRANSFERS // 2]
