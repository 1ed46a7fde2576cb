"""Which loaders penstock's iterator cannot run: they get torch's, whose batches are the same.

A program may ask torch's iterator for something else than torch's batches: a subclass of the loader overrides what the
iterator reads, or a library has put a method of its own into one of torch's classes of iterators. What that does only
torch's iterator knows, so such a pass is torch's.

Penstock's worker processes need sockets that deliver whole messages and pass descriptors, files without a name, and
hooks of a fork: Linux. On macOS and Windows a loader with worker processes falls back; inline loading and threads need
nothing of that.
"""

from __future__ import annotations

import functools
import os
import socket
from multiprocessing.process import BaseProcess
from operator import itemgetter
from types import CodeType
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import _utils
from torch.utils.data import dataloader as torch_module

from penstock.core.errors import OptionError
from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.core.shared_segment import memfd_works
from penstock.loader.config import LoaderConfig

_PROPERTIES = ("_auto_collation", "_index_sampler")
"""Of torch's loader, which its iterator reads; whatever a subclass has by these names is read instead."""

_READ = (
    *("dataset", "sampler", "batch_sampler", "collate_fn", "drop_last", "generator", "in_order", "num_workers"),
    *("multiprocessing_context", "persistent_workers", "pin_memory", "pin_memory_device", "prefetch_factor", "timeout"),
    *("worker_init_fn", "_dataset_kind", "_IterableDataset_len_called"),
)
"""Attributes that it reads, too: a subclass has a say in them only by a property."""

_BASE = torch_module._BaseDataLoaderIter
_SINGLE = torch_module._SingleProcessDataLoaderIter
_MULTI = torch_module._MultiProcessingDataLoaderIter


def why_torch_iterator(config: LoaderConfig, loader: TorchDataLoader[Any]) -> str:
    """Return why a pass of a loader runs on torch's iterator; empty if it runs on penstock's.

    Args:
        config: its arguments.
        loader: itself, whose class may be a subclass.

    Raises:
        OptionError: an argument of penstock's own needs penstock's iterator.
    """
    reason = _reason(config) or _overridden_in(type(loader)) or _patch(config.num_workers > 0)
    if not reason and (loader._dataset_kind == torch_module._DatasetKind.Iterable) != config.is_iterable:
        reason = "the program has set its _dataset_kind to another than its dataset's"
    if not reason:
        return ""
    asked = {
        "worker_type": config.worker_type != "process",
        "errors": config.errors != "raise",
        "seed": config.seed is not None,
        "device": config.arrives_on_device,
        "distributed": config.is_distributed,
        "pin_memory": not isinstance(config.pin_memory, bool),
    }
    needed = [f"{name}=" for name, is_asked in asked.items() if is_asked]
    if needed:
        raise OptionError(
            f"{', '.join(needed)} cannot be had with torch's iterator, which runs this loader because {reason}; leave "
            "it out, or change that"
        )
    return reason


def _reason(config: LoaderConfig) -> str:
    if config.is_datapipe:
        return "legacy DataPipes shard and shuffle through torch's iterator"
    if not config.shares_memory:
        return ""
    if not _has_linux_parts():
        return "penstock's worker processes need Linux and its memfd (num_workers=0 and worker_type='thread' do not)"
    process = getattr(config.context, "Process", None)
    if not (isinstance(process, type) and issubclass(process, BaseProcess)):
        name = getattr(process, "__name__", repr(process))
        return f"Process of its multiprocessing context is {name}, which is no process"
    return ""


@functools.cache
def _has_linux_parts() -> bool:
    return hasattr(os, "register_at_fork") and hasattr(socket, "MSG_CMSG_CLOEXEC") and memfd_works()


def _overridden_in(kind: type) -> str:
    """Return what a subclass has that torch's iterator reads in place of torch's."""
    for one in kind.__mro__:
        if one.__module__.startswith("penstock.loader."):
            return ""
        own = vars(one)
        for name in (*_PROPERTIES, *_READ):
            if name in own and (name in _PROPERTIES or hasattr(type(own[name]), "__set__")):
                return f"its class {one.__qualname__} has a {name} of its own, which torch's iterator reads"
    return ""


# ── what libraries have put into torch's classes ────────────────────────────────────────────────────────────────


class _Methods:
    """The methods of torch's that make its batches, and whether they are torch's still.

    Args:
        kind: the class of iterators.
        functions: others that it calls: what has them, and by which name.
    """

    def __init__(self, kind: type, *functions: tuple[Any, str]) -> None:
        self._kinds, self._functions = (_BASE, kind), functions
        own = [[name for name, value in vars(one).items() if _code_of(value) is not None] for one in self._kinds]
        self._names = frozenset(name for names in own for name in names)
        self._get_base, self._get = (itemgetter(*names) for names in own)
        self._base, self._kind = vars(_BASE), vars(kind)
        self._checked: Any = None

    def patch(self) -> str:
        """Return which is not torch's any more, and whose it is; takes microseconds where nothing was changed."""
        base, kind = self._base, self._kind
        others = [getattr(owner, name) for owner, name in self._functions]
        now = self._get_base(base), self._get(kind), len(base), len(kind), others
        if now == self._checked:
            return ""
        methods = [(one, name) for one in self._kinds for name in self._names & vars(one).keys()]
        for owner, name in [*methods, *self._functions]:
            method = vars(owner)[name]
            code = _code_of(_without_penstocks(method))
            if code is None or not code.co_filename.startswith(_TORCH_FOLDER):
                where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
                module = getattr(method, "__module__", None) or type(method).__module__
                return f"{module}{where} has replaced {owner.__name__}.{name}"
        self._checked = now
        return ""


def _code_of(method: Any) -> CodeType | None:
    found = getattr(method, "fget", None) or getattr(method, "__func__", None) or method
    code = getattr(found, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _without_penstocks(method: Any) -> Any:
    """Return what a method was before `penstock run` began to time it."""
    while (code := _code_of(method)) is not None and code.co_filename.startswith(PACKAGE_FOLDER):
        if not hasattr(method, "__wrapped__"):
            break
        method = method.__wrapped__
    return method


_TORCH_FOLDER = os.path.dirname(_code_of(TorchDataLoader.__iter__).co_filename)  # type: ignore[union-attr]

_READ_BY_ALL = (
    *((TorchDataLoader, name) for name in (*_PROPERTIES, "_get_iterator")),
    (_utils.fetch._MapDatasetFetcher, "fetch"),
    (_utils.fetch._IterableDatasetFetcher, "fetch"),
)
_HERE = _Methods(_SINGLE, *_READ_BY_ALL)
_IN_WORKERS = _Methods(_MULTI, *_READ_BY_ALL, (_utils.worker, "_worker_loop"))


def _patch(has_workers: bool) -> str:
    """Return which method of torch's iterators is no longer torch's; a class may have been replaced as a whole."""
    if found := (_IN_WORKERS if has_workers else _HERE).patch():
        return found
    known: type = _MULTI if has_workers else _SINGLE
    kind = getattr(torch_module, known.__name__)
    return "" if kind is known else f"{kind.__module__}.{kind.__qualname__} has taken the place of {known.__name__}"
