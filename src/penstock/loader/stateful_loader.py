"""penstock.DataLoader: the loader with what torch's has not, its position as a state and the number of its epoch."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.core.errors import OptionError, StateError
from penstock.core.signals.stop_signals import STOP_SIGNALS
from penstock.core.units import to_epoch
from penstock.distributed.stop_agreement import StopRequests
from penstock.loader import dataloader
from penstock.loader.dataloader import T_co, config_of, follow_attributes, runtime_of
from penstock.loader.fallback import why_torch_iterator
from penstock.loader.state_dict import load_state_dict, state_dict_of


class DataLoader(dataloader.DataLoader[T_co]):  # noqa: D101  the base class's, which has all arguments
    __doc__ = dataloader.DataLoader.__doc__
    _counts_epochs = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop: which samples of this epoch have been handed out.

        The state is small, whatever the position, and describes the pass that was begun last. Take it between two
        batches; a batch that raised counts as not handed out until a later one is. Save one for each rank (or rank
        0's only, for map-style datasets with `in_order=True`, where all ranks take as many batches).

        A dataset, sampler or iterator with `state_dict` and `load_state_dict` is asked for its own state, too.

        Raises:
            StateError: the dataset is a legacy DataPipe, or keeps a state that several threads change.

        >>> import torch
        >>> loader = DataLoader(torch.arange(6), batch_size=2, num_workers=2)
        >>> batches = iter(loader)
        >>> next(batches)
        tensor([0, 1])
        >>> state = loader.state_dict()
        >>> other = DataLoader(torch.arange(6), batch_size=2)
        >>> other.load_state_dict(state)
        >>> list(other)
        [tensor([2, 3]), tensor([4, 5])]
        """
        self._check_has_state()
        return state_dict_of(config_of(self), runtime_of(self))

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Make the next pass resume where a state was taken, with exactly the samples not handed out by then.

        The number of workers, the worker type, the batch size and the number of ranks may differ, unless a map-style
        dataset keeps a state of its own. No sample is made again, except for iterable datasets that keep no state:
        those are run through from the beginning. Workers that persist are replaced. A loop that has begun (`iter`) and
        was handed nothing yet begins there, too; one that was handed a batch cannot go on: its `next` is a StateError.

        Args:
            state: what `state_dict` returned; of all ranks, where one rank's is not enough (what
                `torch.distributed.checkpoint` has loaded is of all ranks). {} changes nothing.

        Raises:
            StateError: the state belongs to another dataset or sampler, has another format, or the states of other
                ranks, or as many workers, are needed.
        """
        self._check_has_state()
        load_state_dict(config_of(self), runtime_of(self), state)
        self._iterator = None  # persistent workers have random states and datasets of another position

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Return False, when Accelerate's `prepare` asks before it builds torch's loader from this one's attributes.

        Raises:
            OptionError: this loader has options that torch's has not, and other batches without them.

        Warns:
            UserWarning: otherwise.
        """
        config = config_of(self)
        lost = {
            "seed=": config.seed is not None,
            "errors=": config.errors != "raise",
            "device=": config.device is not None,
            "distributed=": config.is_distributed,
        }
        instead = "leave it out of prepare(), and give distributed=True and device=accelerator.device"
        if names := " and ".join(name for name, is_given in lost.items() if is_given):
            raise OptionError(f"accelerator.prepare(loader) would use torch's DataLoader, without {names}; {instead}")
        warnings.warn(f"accelerator.prepare(loader) uses torch's DataLoader; for penstock's, {instead}", stacklevel=3)
        return False

    def _check_has_state(self) -> None:
        if follow_attributes(self).is_datapipe:
            raise StateError("legacy DataPipes have no state here; use an IterableDataset, or `penstock.open`")
        if reason := why_torch_iterator(config_of(self), self):
            raise StateError(f"this loop has no state, because torch's iterator runs it: {reason}")

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without this call they are counted from 0.

        Called after `iter(loader)` and before the first batch, it is this pass's.

        Where ranks share out the samples, a pass that is left before its end does not count: its epoch comes again, as
        with torch's DistributedSampler, because the other ranks may not have begun it. A rank that goes through a whole
        pass alone calls this before the next.

        After `load_state_dict` the pass of the state is continued, whatever is set, with a warning if that is another
        epoch; unless the state is between two passes, or has nothing left of a map-style dataset's: then the epoch that
        is set begins.

        Raises:
            OptionError: it is no whole number, or negative.
        """
        runtime = runtime_of(self)
        runtime.next_epoch, runtime.is_epoch_set = to_epoch(epoch), True

    def stop_requested(self, *, signals: Iterable[int] = STOP_SIGNALS) -> bool:
        """Return whether to save and stop, because a scheduler has sent a signal; call it once after each step.

        With several ranks of `torch.distributed`, all of them call it after each step, whichever have got the signal,
        and it becomes true on all of them at the same step; from then on it stays true. Steps exchange nothing until
        then (a rank asks the store of `init_process_group` for news every two seconds, for all its loaders together).
        The calls of all loaders of a program are counted together.

        The first call sets the signal handlers, and they are restored when the loader is gone. A handler that the
        program had is called too; without one, the signal has no other effect, so a program that stops calling this
        does not end by it. Ctrl-C stays as it is.

        Args:
            signals: which, at the first call: SIGTERM and SIGUSR1, or others.

        Raises:
            OptionError: the first call is not in the main thread, a signal cannot be watched, or there are several
                ranks without `init_process_group`.
            RankError: some rank has not called this in time (that of `init_process_group`) after another was asked.

        >>> import os, signal
        >>> loader = DataLoader(range(8), batch_size=2)
        >>> for batch in loader:
        ...     if batch[0] == 2:
        ...         os.kill(os.getpid(), signal.SIGUSR1)  # as a scheduler does
        ...     if loader.stop_requested():
        ...         break
        >>> batch
        tensor([2, 3])
        """
        runtime = runtime_of(self)
        if runtime.stop_requests is None:
            runtime.stop_requests = StopRequests(signals)
            weakref.finalize(self, runtime.stop_requests.close)
        return runtime.stop_requests.is_requested()
