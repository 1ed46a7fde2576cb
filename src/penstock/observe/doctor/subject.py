"""What is examined: a loader, a loader with a step, or a function that runs a loop by itself.

A name may stand for

    a DataLoader                       examined alone: what it costs, and what would make it faster
    a function that returns one        the same
    a pair (loader, step)              step(batch) is the training step; also a function that returns such a pair
    any other function                 it is called, and the first loop of its own over a DataLoader is examined

The function takes no arguments. It is ended from inside of its loop when enough has been seen. The first training
loop is the first one with gradients; a function that only ever loops without them, and not for long, is called a
second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from penstock.core.errors import OptionError
from penstock.observe.doctor.conduct import Conductor
from penstock.observe.doctor.watched import conducted


def run(subject: Any, conductor: Conductor) -> None:
    """Run the loop that `subject` stands for under `conductor`.

    Raises:
        OptionError: it stands for none.
        Exception: the loop's own.
    """
    if isinstance(subject, type) or not (callable(subject) or _is_loader(subject) or isinstance(subject, tuple)):
        raise OptionError(
            f"cannot examine {_kind(subject)}; name a DataLoader, a function that returns one or (loader, step), or a "
            "function that runs a training loop"
        )
    given = subject
    if callable(given) and not _is_loader(given):
        with conducted(conductor):
            given = subject()
            if conductor.loader is None and conductor.passive_s:
                conductor.takes_any = True
                given = subject()
        if not _is_given(given):
            _check_ran(conductor, given)
            return
        conductor.forget()  # whatever it looked at while it made the loader
    loader, step = given if isinstance(given, tuple) else (given, None)
    if not _is_loader(loader) or not (step is None or callable(step)):
        raise OptionError(f"expected (loader, step), got ({_kind(loader)}, {_kind(step)})")
    conductor.has_step = step is not None
    conductor.begin(loader)
    _loop(conductor, step)


def _loop(batches: Iterator[Any], step: Callable[[Any], Any] | None) -> None:
    for batch in batches:
        if step is not None:
            step(batch)
        del batch  # a slot that is held cannot be filled


def _is_given(given: Any) -> bool:
    return _is_loader(given) or (isinstance(given, tuple) and len(given) == 2 and _is_loader(given[0]))


def _is_loader(thing: Any) -> bool:
    return isinstance(thing, DataLoader)


def _check_ran(conductor: Conductor, given: Any) -> None:
    if conductor.loader is None:
        raise OptionError(
            f"the function returned {_kind(given)} and looped over no DataLoader; return a DataLoader or "
            "(loader, step), or loop over one"
        )


def _kind(thing: Any) -> str:
    return "nothing" if thing is None else f"a {type(thing).__name__}"
