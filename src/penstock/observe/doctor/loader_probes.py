"""Measures the parts of one loader, one after another, each with its fraction of the time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.measurement_log import MeasurementLog
from penstock.observe.doctor.measurements import Settings
from penstock.observe.doctor.probes.forked.copy_on_write import measure_copy_on_write
from penstock.observe.doctor.probes.forked.worker_share import measure_worker_share
from penstock.observe.doctor.probes.pickle_cost import measure_pickle
from penstock.observe.doctor.probes.sample_cost import SampleProbe
from penstock.observe.doctor.probes.transport_cost import measure_transport_s
from penstock.observe.doctor.probes.worker_noise import measure_worker_noise

_SAMPLES, _TRANSPORT, _COPY_ON_WRITE, _SHARE, _PICKLE = 0.54, 0.14, 0.18, 0.18, 0.08
"""Fractions of the time (a stream has a share, and no memory to copy); what is left is for collating, and for starting
workers."""

_LEAST_COPY_ON_WRITE_S, _NOISE_S = 0.6, 1.5

_TRANSFERS = 5


class LoaderProbes:
    """Runs the probes that apply to a loader.

    Args:
        loader: whose dataset, collate function and workers are measured.
        settings: its arguments.
        seconds: the time of all of them.
        log: takes a note of what could not be measured.
    """

    def __init__(self, loader: DataLoader[Any], settings: Settings, seconds: float, log: MeasurementLog) -> None:
        self._loader = loader
        self._settings = settings
        self._seconds = seconds
        self._log = log

    def measure(self, batch: Any) -> dict[str, Any]:
        """Return the results, by their fields of `Measurements`; `batch` is one of the loader's."""
        return {
            **self._measure_workers(),
            **self._measure_samples(),
            **self._measure_noise(),
            "transfer_s": self._log.attempt(
                "copying a batch to the device", lambda: _transfer_s(batch, is_pinned=self._settings.pin_memory), 2.0
            ),
        }

    def _measure_workers(self) -> dict[str, Any]:
        own = self._settings
        found: dict[str, Any] = {}
        is_forked = own.start_method == "fork"
        # A dataset may use the accelerator, and CUDA cannot be used in a forked child once its parent has used it.
        if is_forked and not torch.accelerator.is_available():
            seconds = max(_LEAST_COPY_ON_WRITE_S, self._seconds * _COPY_ON_WRITE)
            found["copy_on_write"] = self._log.attempt(
                "a worker's memory", lambda: measure_copy_on_write(self._loader, seconds), seconds + 1.0
            )
            if own.is_iterable and own.num_workers > 1 and own.kind == "torch":
                seconds = self._seconds * _SHARE
                found["worker_share"] = self._log.attempt(
                    "a worker's share", lambda: measure_worker_share(self._loader, seconds), seconds + 2.0
                )
        if own.num_workers and own.start_method and not is_forked:
            found["dataset_pickle"] = self._log.attempt(
                "the dataset's pickle",
                lambda: measure_pickle(self._loader.dataset, self._seconds * _PICKLE),
                self._seconds * _PICKLE * 2,
            )
        return found

    def _measure_noise(self) -> dict[str, Any]:
        """Compare what forked workers draw; last, because a dataset that was used here may hang in them."""
        own = self._settings
        if own.start_method != "fork" or own.is_iterable or torch.accelerator.is_available():
            return {}
        noise = self._log.attempt(
            "the random numbers of workers", lambda: measure_worker_noise(self._loader), _NOISE_S, least_s=_NOISE_S
        )
        return {"worker_noise": noise}

    def _measure_samples(self) -> dict[str, Any]:
        own, attempt = self._settings, self._log.attempt
        probe = SampleProbe(self._loader, self._seconds * _SAMPLES)
        attempt("samples in this process", probe.run, self._seconds * _SAMPLES)
        found: dict[str, Any] = {
            "samples": attempt("what samples cost", probe.costs, 2.0),
            "image_decode": probe.image_decode(),
            "changed_data": probe.changed_data,
            "tensor_keys": probe.tensor_keys,
        }
        if not probe.samples and not probe.error:
            self._log.add("samples in this process: not one was made in time; a sample takes very long")
        if probe.error:
            self._log.add(f"samples in this process: {probe.error}")
        if probe.samples and own.num_workers:
            transport_s = self._seconds * _TRANSPORT
            found["transport_s"] = attempt(
                "transport", lambda: measure_transport_s(self._loader, probe.samples, transport_s), transport_s + 4.0
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
