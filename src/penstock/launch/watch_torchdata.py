"""Watches torchdata's loaders, which are left alone: their order and their states remain torchdata's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from penstock.loader.dataloader import DataLoader
from penstock.observe.live.torch_watch import TorchWatch

_MODULE = "torchdata.stateful_dataloader.stateful_dataloader"


def watch_stateful_loader(watch: TorchWatch, register: Callable[[Any], object]) -> None:
    """Call `register` with each new StatefulDataLoader, and time its iterators. `watch.remove` undoes it.

    Args:
        watch: times the iterators.
        register: called with each loader at the end of its constructor.
    """
    module: Any = importlib.import_module(_MODULE)

    def around_init(construct: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            construct(self, *args, **options)
            register(self)

        return init

    def around_get_iterator(get_iterator: Any) -> Any:
        def uncounted(self: Any) -> Any:
            with watch.not_counting():  # a stream without a state is run through, up to where it resumes
                return get_iterator(self)

        return uncounted

    watch.replace(module.StatefulDataLoader, "__init__", around_init)
    watch.replace(module.StatefulDataLoader, "_get_iterator", around_get_iterator)
    for name in ("_StatefulSingleProcessDataLoaderIter", "_StatefulMultiProcessingDataLoaderIter"):
        if (kind := getattr(module, name, None)) is not None:  # another version of torchdata may have others
            watch.time_iterators(kind)
    if issubclass(module.StatefulDataLoader, DataLoader):
        # Penstock's warns at the end of penstock's constructor, which is not called.
        torch_loader: Any = DataLoader.__base__
        module.StatefulDataLoader.check_worker_number_rationality = torch_loader.check_worker_number_rationality


def watch_node_loader(watch: TorchWatch, register: Callable[[Any], object]) -> None:
    """Call `register` with each new `torchdata.nodes.Loader`, and time its iterators. `watch.remove` undoes it."""
    module: Any = importlib.import_module("torchdata.nodes.loader")

    def around_init(construct: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            construct(self, *args, **options)
            register(self)

        return init

    watch.replace(module.Loader, "__init__", around_init)
    watch.time_nodes(module.LoaderIterator)
