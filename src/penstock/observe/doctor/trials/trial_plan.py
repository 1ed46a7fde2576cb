"""Which trials a loop gets: the unchanged loop, and each change that could pay for this loader on this machine."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.dataloader import _DatasetKind

from penstock.loader.dataloader import DataLoader as PenstockLoader
from penstock.loader.dataloader import worker_type_of
from penstock.observe.doctor.measurements import Machine, Settings
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import (
    AS_IS,
    FEWER_WORKERS,
    FREE,
    MORE_WORKERS,
    NO_WORKERS,
    ONE_THREAD,
    PENSTOCK,
    PERSISTENT,
    PINNED,
    PROCESSES,
    THREADS,
)
from penstock.observe.doctor.trials.batch_source import (
    BatchSource,
    InlineSource,
    RepeatedBatchSource,
    ThreadSource,
)
from penstock.observe.doctor.trials.loader_variant import build_variant


def read_settings(loader: DataLoader[Any]) -> Settings:
    """Return the arguments of a loader."""
    is_process = loader.num_workers > 0 and worker_type_of(loader) == "process"
    context = loader.multiprocessing_context
    if is_process and context is None:
        import multiprocessing as context
    return Settings(
        dataset=type(loader.dataset).__name__,
        kind="penstock" if isinstance(loader, PenstockLoader) else "torch",
        num_workers=loader.num_workers,
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        prefetch_factor=loader.prefetch_factor or 2,
        persistent_workers=loader.persistent_workers,
        pin_memory=bool(loader.pin_memory),
        start_method=(context.get_start_method() or "") if is_process else "",
        length=_length(loader),
        is_iterable=loader._dataset_kind == _DatasetKind.Iterable,
        collates_by_default=loader.collate_fn is default_collate,
        shuffles="Random" in type(loader.sampler).__name__,
        fetches_in_bulk=callable(getattr(loader.dataset, "__getitems__", None)),
    )


def plan_sources(loader: DataLoader[Any], machine: Machine, *, has_step: bool) -> list[BatchSource]:
    """Return the sources to try, the loop's own loader first."""
    own = read_settings(loader)
    workers = own.num_workers
    is_threaded = workers > 0 and worker_type_of(loader) == "thread"
    kind = ThreadSource if is_threaded else BatchSource if workers else InlineSource
    sources: list[BatchSource] = [kind(AS_IS, lambda: loader)]
    if has_step:
        is_crowded = machine.is_busy or machine.load >= machine.cores
        if is_crowded and machine.intra_op_threads > 1 and not machine.accelerator:
            sources.append(RepeatedBatchSource(ONE_THREAD, line="torch.set_num_threads(1)"))
        sources.append(RepeatedBatchSource(FREE))
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return sources
    if (
        workers
        and not own.persistent_workers
        and own.length is not None
        and own.length <= THRESHOLDS.short_epoch_batches
    ):
        sources.append(_changed_source(loader, PERSISTENT, persistent_workers=True))
    pinned = {"pin_memory": True} if machine.accelerator and not own.pin_memory else {}
    if pinned:
        sources.append(kind(PINNED, lambda: build_variant(loader, **pinned), line="pin_memory=True"))
    sources += _fewer_workers(loader, machine, own)
    if own.kind == "torch":
        line = f"penstock.DataLoader(..., num_workers={workers}{', pin_memory=True' * bool(pinned)})"
        source = BatchSource if workers else InlineSource
        sources.append(source(PENSTOCK, lambda: build_variant(loader, penstock=True, **pinned), line=line))
    if is_threaded:
        sources.append(_changed_source(loader, PROCESSES, worker_type="process"))
    elif workers + 2 <= max(2, THRESHOLDS.tried_workers_per_core * machine.usable_cores):
        sources.append(_changed_source(loader, MORE_WORKERS, num_workers=workers + 2))
    if not own.is_iterable and not is_threaded:
        sources.append(_thread_source(loader, max(2, min(workers or 2, int(machine.usable_cores)))))
    return sources


def _fewer_workers(loader: DataLoader[Any], machine: Machine, own: Settings) -> list[BatchSource]:
    if not own.num_workers:
        return []
    fits = max(1, round(THRESHOLDS.workers_per_core * machine.usable_cores))
    sources: list[BatchSource] = []
    if own.num_workers > machine.usable_cores and fits < own.num_workers:
        sources.append(_changed_source(loader, FEWER_WORKERS, num_workers=fits))
    if not own.is_iterable:
        sources.append(InlineSource(NO_WORKERS, lambda: build_variant(loader, num_workers=0), line="num_workers=0"))
    return sources


def _changed_source(loader: DataLoader[Any], name: str, **changes: Any) -> BatchSource:
    line = ", ".join(f"{option}={value!r}" for option, value in changes.items())
    return BatchSource(name, lambda: build_variant(loader, **changes), line=line)


def _thread_source(loader: DataLoader[Any], threads: int) -> BatchSource:
    def make() -> DataLoader[Any]:
        return build_variant(
            loader,
            penstock=True,
            num_workers=threads,
            worker_type="thread",
            persistent_workers=False,
            worker_init_fn=None,
        )

    line = f"penstock.DataLoader(..., num_workers={threads}, worker_type='thread')"
    return ThreadSource(THREADS, make, line=line)


def _length(loader: DataLoader[Any]) -> int | None:
    if loader._dataset_kind == _DatasetKind.Iterable:
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError):
        return None
