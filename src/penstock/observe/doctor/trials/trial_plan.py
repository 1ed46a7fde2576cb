"""Which trials a loop gets: the unchanged loop, and each change that could pay for this loader on this machine."""

from __future__ import annotations

import multiprocessing
from typing import Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.dataloader import _DatasetKind

from penstock.loader.dataloader import DataLoader as PenstockLoader
from penstock.loader.dataloader import worker_type_of
from penstock.observe.doctor.measurements import Machine, Settings
from penstock.observe.doctor.trial import AS_IS, FEWER_WORKERS, FREE, MORE_WORKERS, PENSTOCK
from penstock.observe.doctor.trials.batch_source import (
    BatchSource,
    InlineSource,
    RepeatedBatchSource,
    ThreadSource,
)
from penstock.observe.doctor.trials.loader_variant import build_variant
from penstock.observe.doctor.trials.other_loops import length_of
from penstock.observe.doctor.worker_estimate import fitting_workers

_TRIED_WORKERS_PER_CORE = 2.0
"""Workers per core: with more than this, two more workers are not tried."""


def read_settings(loader: DataLoader[Any]) -> Settings:
    """Return the arguments of a loader."""
    is_process = loader.num_workers > 0 and worker_type_of(loader) == "process"
    context = loader.multiprocessing_context or multiprocessing
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    return Settings(
        dataset=type(loader.dataset).__name__,
        kind="penstock" if isinstance(loader, PenstockLoader) else "torch",
        num_workers=loader.num_workers,
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        prefetch_factor=loader.prefetch_factor or 2,
        persistent_workers=loader.persistent_workers,
        pin_memory=bool(loader.pin_memory),
        start_method=(context.get_start_method() or "") if is_process else "",
        length=None if is_iterable else length_of(loader),
        is_iterable=is_iterable,
        collates_by_default=loader.collate_fn is default_collate,
        shuffles="Random" in type(loader.sampler).__name__,
        fetches_in_bulk=callable(getattr(loader.dataset, "__getitems__", None)),
    )


def plan_sources(loader: DataLoader[Any], machine: Machine, *, has_step: bool) -> list[BatchSource]:
    """Return the sources to try, the loop's own loader first.

    On a busy machine nothing is tried but free loading: what another number of workers gains there, it takes from other
    programs.
    """
    own = read_settings(loader)
    workers = own.num_workers
    is_threaded = workers > 0 and worker_type_of(loader) == "thread"
    kind = ThreadSource if is_threaded else BatchSource if workers else InlineSource
    sources: list[BatchSource] = [kind(AS_IS, lambda: loader)]
    if has_step:
        sources.append(RepeatedBatchSource(FREE))
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe) or machine.is_busy or machine.is_crowded:
        return sources
    if workers + 2 <= max(2, _TRIED_WORKERS_PER_CORE * machine.usable_cores):
        more: dict[str, Any] = {"num_workers": workers + 2}
        sources.append(BatchSource(MORE_WORKERS, lambda: build_variant(loader, **more), line=_text(more)))
    sources += _fewer_workers(loader, machine, own)
    if own.kind == "torch":
        source = BatchSource if workers else InlineSource
        line = f"penstock.DataLoader(..., num_workers={workers})"
        sources.append(source(PENSTOCK, lambda: build_variant(loader, penstock=True), line=line))
    return sources


def _fewer_workers(loader: DataLoader[Any], machine: Machine, own: Settings) -> list[BatchSource]:
    """Return the loader with fewer workers: as many as the cores keep busy, or none where there are no more."""
    if not own.num_workers or (own.is_iterable and own.num_workers <= machine.usable_cores):
        return []
    fits = fitting_workers(machine.usable_cores)
    fewer: dict[str, Any] = {"num_workers": fits if fits < own.num_workers else 0}
    source = BatchSource if fewer["num_workers"] else InlineSource
    return [source(FEWER_WORKERS, lambda: build_variant(loader, **fewer), line=_text(fewer))]


def _text(changes: dict[str, int]) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in changes.items())
