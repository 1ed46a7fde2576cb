"""What is tuned: a DataLoader, torch's or ours, and the step that its batches go to."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from penstock.core.errors import OptionError
from penstock.feed.auto import Lap, Regulator
from penstock.feed.loader import DataLoader
from penstock.feed.transport import codec
from penstock.tune.setting import Setting

Step = Callable[[Any], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A loader and a step. The loader itself is never iterated: its dataset, sampler and functions are."""

    loader: TorchDataLoader[Any]
    """Whose settings are looked for."""

    step: Step | None = None
    """What the loop does with a batch; None for nothing."""

    step_s: float = 0.0
    """With no `step`, how long one takes, on a device: the host sleeps for so long."""

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset shares out its own samples."""
        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def can_take_threads(self) -> bool:
        """Whether workers may be threads: not where each needs a dataset, or a random state, of its own."""
        return not self.is_iterable and self.loader.worker_init_fn is None

    def run_step(self, batch: Any) -> None:
        """Do what the loop does with a batch."""
        if self.step is not None:
            self.step(batch)
        elif self.step_s:
            time.sleep(self.step_s)

    def build(self, setting: Setting, *, most: int) -> DataLoader[Any]:
        """Return a loader like the subject's with `setting`, over its batches again and again.

        Its number of workers can be changed while it runs, up to `most`, where no sample can tell its worker.
        """
        loader = self.loader
        given = {**self._own(), **setting.arguments(), "num_workers": setting.workers}
        if setting.workers:
            given |= {"timeout": loader.timeout, "prefetch_factor": setting.prefetch_factor}
            given |= {"persistent_workers": self.is_iterable}
        if setting.body == "process":
            given |= {
                "worker_init_fn": loader.worker_init_fn,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        if self.is_iterable:
            given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is not None:
            given |= {"batch_sampler": _Endless(loader.batch_sampler)}
        else:
            given |= {"batch_size": None, "sampler": _Endless(loader.sampler)}
        # Workers are forked with what the training process has opened and cached: so it gets a dataset of its own.
        dataset = loader.dataset if setting.body == "process" else apart(loader.dataset)
        made: DataLoader[Any] = DataLoader(dataset, collate_fn=loader.collate_fn, **given)
        if setting.workers and not self.is_iterable:
            made._regulator = Held(workers=setting.workers, most=most)
        return made

    def _own(self) -> dict[str, Any]:
        """Return those arguments of ours that the loader was made with, which are not looked for."""
        loader = self.loader
        given: dict[str, Any] = {"in_order": loader.in_order}
        if isinstance(loader, DataLoader):
            given |= {
                "dispatch": loader._dispatch_option,
                "errors": loader._errors,
                "keep_batch_size": loader._keep_batch_size,
                "max_deaths": loader._max_deaths,
                "seed": loader.seed,
            }
        return given


def _called(function: Callable[[], Any]) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise OptionError(f"the function that makes the loader must take nothing ({error})") from error
    return function()


def apart(dataset: Any) -> Any:
    """Return a copy of a dataset that shares its arrays and tensors; the dataset itself where it cannot be copied."""
    try:
        skeleton, arrays = codec.flatten(dataset)
        return pickle.loads(skeleton, buffers=arrays)
    except Exception:  # noqa: BLE001  the user's own __getstate__ or __setstate__ may run here
        return dataset


class Held(Regulator):
    """Has as many workers as it is told."""

    def __init__(self, *, workers: int, most: int) -> None:
        super().__init__(workers=workers, most=most, fixed=workers)
        self.wanted = workers

    def observe(self, lap: Lap) -> int:
        """Return what was asked for."""
        self.workers = max(self.least, min(self.most, self.wanted))
        return self.workers

    def choose(self) -> int:
        """Return what was asked for."""
        return self.wanted


class _Endless:
    """A sampler over and over, so that no epoch's end is measured."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[Any]:
        while True:
            index = None
            for index in self._inner:
                yield index
            if index is None:
                return


def subject_of(found: Any, *, step: Step | None = None, step_s: float = 0.0) -> Subject:
    """Return the subject that `found` names: a DataLoader, a function that returns one, or (loader, step).

    Raises:
        OptionError: it is none of these, or it is a loader that cannot be tuned.
    """
    if not isinstance(found, (TorchDataLoader, tuple)) and callable(found):
        found = _called(found)
    if isinstance(found, tuple) and len(found) == 2 and callable(found[1]):
        found, own_step = found
        step = step or own_step
    if not isinstance(found, TorchDataLoader):
        raise OptionError(
            f"a DataLoader is needed, or a function that returns one, or (loader, step); this is {type(found).__name__}"
        )
    if isinstance(found.dataset, (IterDataPipe, MapDataPipe)):
        raise OptionError("legacy DataPipes iterate as torch's own, with torch's settings; use a Dataset to tune it")
    if step is not None and not callable(step):
        raise OptionError(f"a step is a function that takes a batch; this is {type(step).__name__}")
    return Subject(loader=found, step=step, step_s=step_s)
