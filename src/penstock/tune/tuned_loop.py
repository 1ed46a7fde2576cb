"""The loop that is tuned: a DataLoader, torch's or penstock's, and the step that gets its batches."""

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
from penstock.loader.dataloader import DataLoader, config_of, runtime_of
from penstock.loader.scheduling.auto_workers import AutoWorkers, BatchTiming
from penstock.loader.transport import codec
from penstock.tune.setting import Setting

Step = Callable[[Any], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedLoop:
    """A loader and a step. The loader itself is never iterated; its dataset, sampler and functions are used."""

    loader: TorchDataLoader[Any]
    """The loader whose setting is searched."""

    step: Step | None = None
    """What the loop does with a batch; None for nothing."""

    step_s: float = 0.0
    """Without `step`: how long one takes on a device. The host sleeps for that time."""

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset is an IterableDataset."""
        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def can_take_threads(self) -> bool:
        """Whether workers may be threads: not if each needs its own dataset or random state."""
        return not self.is_iterable and self.loader.worker_init_fn is None

    @property
    def batches_per_start(self) -> int | None:
        """How many batches worker processes make before others are started: an epoch's; None where that is unknown."""
        if self.loader.persistent_workers:
            return None
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):  # the dataset, or the sampler, has no length
            return None

    def run_step(self, batch: Any) -> None:
        """Do what the loop does with a batch."""
        if self.step is not None:
            self.step(batch)
        elif self.step_s:
            time.sleep(self.step_s)

    def build(self, setting: Setting, *, most: int) -> DataLoader[Any]:
        """Return a loader like `loader` with `setting`, which repeats its batches without an end.

        Its number of workers can be changed while it runs, up to `most`, unless samples depend on their worker.
        """
        loader = self.loader
        given = {**self._own(), **setting.arguments(), "num_workers": setting.workers}
        if setting.workers:
            given |= {"timeout": loader.timeout, "prefetch_factor": setting.prefetch_factor}
            given |= {"persistent_workers": self.is_iterable}
        if setting.worker_type == "process":
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
        # Forked workers inherit what the dataset has opened and cached here, so this process uses a copy of it.
        dataset = loader.dataset if setting.worker_type == "process" else copy_sharing_arrays(loader.dataset)
        made: DataLoader[Any] = DataLoader(dataset, collate_fn=loader.collate_fn, **given)
        if setting.workers and not self.is_iterable:
            runtime_of(made).auto_workers = ManualWorkers(workers=setting.workers, most=most)
        return made

    def _own(self) -> dict[str, Any]:
        """Return the loader's penstock arguments that the search does not vary."""
        loader = self.loader
        given: dict[str, Any] = {"in_order": loader.in_order}
        if isinstance(loader, DataLoader):
            own = config_of(loader).own_arguments()
            kept = ("dispatch", "errors", "max_worker_crashes", "seed")
            given |= {name: own[name] for name in kept}
        return given


def _call_factory(function: Callable[[], Any]) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise OptionError(f"the function that returns the loader must take no arguments ({error})") from error
    return function()


def copy_sharing_arrays(dataset: Any) -> Any:
    """Return a copy of a dataset that shares its arrays and tensors; the dataset itself if it cannot be copied."""
    try:
        skeleton, arrays = codec.flatten(dataset)
        return pickle.loads(skeleton, buffers=arrays)
    except Exception:  # noqa: BLE001  the user's own __getstate__ or __setstate__ may run here
        return dataset


class ManualWorkers(AutoWorkers):
    """Keeps the number of workers that was last set in `wanted`."""

    def __init__(self, *, workers: int, most: int) -> None:
        super().__init__(workers=workers, most=most)
        self.wanted = workers

    def observe(self, timing: BatchTiming) -> int:
        """Return the number that was set."""
        self.workers = min(self.most, self.wanted)
        return self.workers

    def choose(self, *, is_fixed: bool) -> int:
        """Return the number that was set."""
        return self.wanted


class _Endless:
    """Repeats a sampler, so that trials do not include the end of an epoch."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[Any]:
        while True:
            index = None
            for index in self._inner:
                yield index
            if index is None:
                return


def resolve_tuned_loop(found: Any, *, step: Step | None = None, step_s: float = 0.0) -> TunedLoop:
    """Return the loop that an object stands for: a DataLoader, a function that returns one, or (loader, step).

    Raises:
        OptionError: it is none of these, or its loader cannot be tuned.
    """
    if not isinstance(found, (TorchDataLoader, tuple)) and callable(found):
        found = _call_factory(found)
    if isinstance(found, tuple) and len(found) == 2 and callable(found[1]):
        found, own_step = found
        step = step or own_step
    if not isinstance(found, TorchDataLoader):
        raise OptionError(
            f"a DataLoader is needed, or a function that returns one, or (loader, step); this is {type(found).__name__}"
        )
    if isinstance(found.dataset, (IterDataPipe, MapDataPipe)):
        raise OptionError(
            "legacy DataPipes always load as in torch, with torch's settings; use a Dataset to tune the loader"
        )
    if step is not None and not callable(step):
        raise OptionError(f"a step has to be a function that takes a batch; this is {type(step).__name__}")
    return TunedLoop(loader=found, step=step, step_s=step_s)
