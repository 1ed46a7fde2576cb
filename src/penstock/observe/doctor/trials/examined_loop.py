"""Runs the loop that is to be examined, whatever form it was given in.

The loop may be

    a DataLoader                       measured alone: what it costs, and what would make it faster
    a function that returns one        the same
    a pair (loader, step)              step(batch) is the training step; also a function that returns such a pair
    any other function                 it is called, and its first training loop over a DataLoader is examined

The function takes no arguments. It is ended from inside its loop when all trials are over. The first training loop is
the first one with gradients, once there is an optimizer; a function without such a loop, which does not loop for long,
is called a second time, and its first loop is examined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from penstock.core.errors import OptionError
from penstock.observe.doctor.trials.program_loops import patch_iteration
from penstock.observe.doctor.trials.trial_scheduler import TrialScheduler


def run_loop(loop: Any, scheduler: TrialScheduler) -> None:
    """Run `loop` with its batches from `scheduler`.

    Raises:
        OptionError: it is none of the forms above.
        Exception: from the loop itself.
    """
    if isinstance(loop, type) or not (callable(loop) or isinstance(loop, DataLoader | tuple)):
        raise OptionError(
            f"cannot examine {_describe_type(loop)}; name a DataLoader, a function that returns one or (loader, step), "
            "or a function that runs a training loop"
        )
    if callable(loop) and not isinstance(loop, DataLoader):
        with patch_iteration(scheduler):
            returned = _call(loop)
            if scheduler.loader is None and scheduler.has_looped and not _is_loop(returned):
                scheduler.accepts_any = True
                returned = _call(loop)
        if scheduler.later_epochs is not None and scheduler.later_epochs.is_running:
            scheduler.later_epochs.has_ended = True
            return
        if not _is_loop(returned):
            _check_has_looped(scheduler, returned)
            return
        scheduler.reset()  # whatever it iterated over while it created the loader
        loop = returned
    loader, step = loop if isinstance(loop, tuple) else (loop, None)
    if not isinstance(loader, DataLoader) or not (step is None or callable(step)):
        raise OptionError(f"expected (loader, step), got ({_describe_type(loader)}, {_describe_type(step)})")
    scheduler.has_step = step is not None
    scheduler.begin(loader)
    _iterate(scheduler, step)


def _call(loop: Callable[[], Any]) -> Any:
    try:
        return loop()
    except SystemExit as exited:
        if exited.code:
            raise RuntimeError(f"it exited with {exited.code!r}") from exited
        return None


def _iterate(batches: Iterator[Any], step: Callable[[Any], Any] | None) -> None:
    for batch in batches:
        if step is not None:
            step(batch)
        del batch  # a slot cannot be filled while its batch is alive


def _is_loop(returned: Any) -> bool:
    if isinstance(returned, tuple):
        return len(returned) == 2 and isinstance(returned[0], DataLoader)
    return isinstance(returned, DataLoader)


def _check_has_looped(scheduler: TrialScheduler, returned: Any) -> None:
    if scheduler.loader is None:
        steps = scheduler.optimizers.steps
        made = f"its optimizers made {steps} steps" if steps else "no optimizer of torch made a step"
        raise OptionError(
            f"the function returned {_describe_type(returned)} and looped over no DataLoader, and {made}; return a "
            "DataLoader or (loader, step), or loop over one"
        )


def _describe_type(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
