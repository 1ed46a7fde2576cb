"""Another loader like the examined one, with some arguments changed."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.loader import stateful_loader
from penstock.loader.dataloader import DataLoader as PenstockLoader
from penstock.loader.dataloader import follow_attributes


def build_variant(loader: DataLoader[Any], *, penstock: bool | None = None, **changes: Any) -> DataLoader[Any]:
    """Return a loader like `loader` except for `changes`; `penstock` chooses the class, by default the same."""
    is_penstock = isinstance(loader, PenstockLoader) if penstock is None else penstock
    own = {}
    if isinstance(loader, PenstockLoader):
        config = follow_attributes(loader)
        own = {"pin_memory": config.pin_memory, **config.own_arguments()}
    options: dict[str, Any] = {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        **_sampling(loader),
        **own,
        **changes,
    }
    if not options["num_workers"]:
        options.update(multiprocessing_context=None, prefetch_factor=None, persistent_workers=False, timeout=0)
    if options.get("worker_type") == "thread":
        options.update(multiprocessing_context=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # the trial shows how many are too many
        variant = stateful_loader.DataLoader(**options) if is_penstock else DataLoader(**options)
    variant.check_worker_number_rationality = lambda: None  # type: ignore[method-assign]  # torch warns in each epoch
    return variant


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    if loader._dataset_kind == _DatasetKind.Iterable:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": None, "sampler": loader.sampler}
