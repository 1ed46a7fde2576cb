"""Which trials a loader gets: the loop as it is, and each change that could be worth something here."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.dataloader import _DatasetKind

from penstock.feed.loader import DataLoader as PenstockLoader
from penstock.observe.doctor.sources import Gated, Inline, Repeated, Source, variant
from penstock.observe.examination import Machine, Settings
from penstock.observe.trial import (
    AS_IT_IS,
    FEWER_WORKERS,
    FREE,
    MORE_WORKERS,
    NO_WORKERS,
    PENSTOCK,
    PERSISTENT,
    PINNED,
    PROCESSES,
    THREADS,
)

_MOST_WORKERS_EACH_CORE = 2
_SHORT_EPOCH = 64


def settings_of(loader: DataLoader[Any]) -> Settings:
    """Return how a loader was made."""
    is_process = loader.num_workers > 0 and getattr(loader, "_body", "process") == "process"
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
    )


def trials_of(loader: DataLoader[Any], machine: Machine, *, has_step: bool) -> list[Source]:
    """Return the sources to try, the loop as it is first."""
    own = settings_of(loader)
    workers = own.num_workers
    kind = Source if workers else Inline
    is_threaded = workers > 0 and getattr(loader, "_body", "") == "thread"
    sources: list[Source] = [kind(AS_IT_IS, lambda: loader)]
    if is_threaded:  # a loader like it, since threads can be stopped in their dataset only
        sources = [Gated(AS_IT_IS, lambda gate: variant(loader, dataset=gate), loader.dataset, line="")]
    if has_step:
        sources.append(Repeated(FREE))
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return sources
    sources += _fewer(loader, machine, own)
    if own.kind == "torch":
        line = f"penstock.DataLoader(..., num_workers={workers})"
        source = Source if workers else Inline
        sources.append(source(PENSTOCK, lambda: variant(loader, penstock=True), line=line))
    if is_threaded:
        sources.append(_changed(loader, PROCESSES, workers="process"))
    elif workers + 2 <= max(2, _MOST_WORKERS_EACH_CORE * machine.usable_cores):
        sources.append(_changed(loader, MORE_WORKERS, num_workers=workers + 2))
    if not own.is_iterable and not is_threaded:
        sources.append(_threads(loader, max(2, min(workers or 2, int(machine.usable_cores)))))
    if workers and not own.persistent_workers and own.length is not None and own.length <= _SHORT_EPOCH:
        sources.append(_changed(loader, PERSISTENT, persistent_workers=True))
    if machine.accelerator and not own.pin_memory:
        sources.append(_changed(loader, PINNED, pin_memory=True))
    return sources


def _fewer(loader: DataLoader[Any], machine: Machine, own: Settings) -> list[Source]:
    if not own.num_workers:
        return []
    fits = max(1, round(1.5 * machine.usable_cores))  # some wait while others compute
    if own.num_workers > machine.usable_cores and fits < own.num_workers:
        return [_changed(loader, FEWER_WORKERS, num_workers=fits)]
    if own.is_iterable:
        return []
    return [Inline(NO_WORKERS, lambda: variant(loader, num_workers=0), line="num_workers=0")]


def _changed(loader: DataLoader[Any], name: str, **changes: Any) -> Source:
    line = ", ".join(f"{option}={value!r}" for option, value in changes.items())
    return Source(name, lambda: variant(loader, **changes), line=line)


def _threads(loader: DataLoader[Any], threads: int) -> Source:
    def make(dataset: Any) -> DataLoader[Any]:
        return variant(
            loader,
            penstock=True,
            dataset=dataset,
            num_workers=threads,
            workers="thread",
            persistent_workers=False,
            worker_init_fn=None,
        )

    line = f"penstock.DataLoader(..., num_workers={threads}, workers='thread')"
    return Gated(THREADS, make, loader.dataset, line=line)


def _length(loader: DataLoader[Any]) -> int | None:
    if loader._dataset_kind == _DatasetKind.Iterable:
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError):
        return None
