"""One examination, from beginning to end, in about the time that it was given.

First the loop, with all trials by turns; then, in this process, its parts: a forked worker's memory, the dataset's
pickle, samples one by one, collating, handing over, threads. The order is for the dataset's sake: workers are
started before anything has been read in this process, so that they inherit no open file.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from penstock.core.errors import PenstockError
from penstock.observe.doctor.alarm import at_most
from penstock.observe.doctor.conduct import Conductor, EnoughError
from penstock.observe.doctor.dataset import Inspection
from penstock.observe.doctor.growth import growth
from penstock.observe.doctor.handing import handing_s
from penstock.observe.doctor.limits import CGROUP, SHM, Limits
from penstock.observe.doctor.lock import threads_pay
from penstock.observe.doctor.pickled import pickled
from penstock.observe.doctor.subject import run
from penstock.observe.doctor.trials import settings_of, trials_of
from penstock.observe.examination import Examination, Pickled, Threads

_LOOP, _SAMPLES, _HANDING, _LOCK, _GROWTH, _PICKLE = 0.55, 0.2, 0.06, 0.06, 0.09, 0.04
_LATE = 1.5
_PREPARING_S = 600.0
_CLOSING_S = 12.0
_LEAST_S = 0.3
_NOT_THE_USERS = (os.path.dirname(torch.__file__), str(Path(__file__).parents[2]))
_Found = TypeVar("_Found")


class OverError(BaseException):
    """A part of the examination took too long."""


@dataclass(slots=True)
class _Notes:
    """What could not be measured, and why."""

    until: float = math.inf
    """When all should be over."""

    lines: list[str] = field(default_factory=list)

    def attempt(self, what: str, measure: Callable[[], _Found], seconds: float) -> _Found | None:
        """Return what `measure` returns, or None, with a note, when it fails or takes much longer than `seconds`."""
        try:
            left_s = max(_LEAST_S, self.until - time.perf_counter())
            with at_most(min(left_s, seconds * _LATE + 1.0), OverError):
                return measure()
        except OverError:
            self.lines.append(f"{what}: not within {seconds:.1f} s; give more --seconds")
        except Exception as error:
            self.lines.append(f"{what}: {_one_line(error)}")
        return None


def examine(
    subject: Any, *, name: str = "", seconds: float = 20.0, cgroup: Path = CGROUP, shm: Path = SHM
) -> Examination:
    """Measure the loop or the loader that `subject` stands for (see `penstock.observe.doctor.subject`).

    Args:
        subject: a DataLoader, a pair (loader, step), or a function.
        name: what it is called in the report.
        seconds: about how long to take. A call into C that never returns to Python cannot be cut short.
        cgroup: where the kernel shows this process's control group.
        shm: where torch's workers put their batches.

    Raises:
        OptionError: the subject stands for no loop.

    Example:
        >>> loader = DataLoader(torch.arange(64.0), batch_size=8)
        >>> found = examine((loader, lambda batch: batch.sum()), seconds=1.0)
        >>> found.as_it_is is not None, found.settings.num_workers
        (True, 0)
    """
    began = time.perf_counter()
    limits, notes = Limits(cgroup, shm), _Notes()
    machine = limits.machine()

    def plan(loader: DataLoader[Any], has_step: bool) -> Any:
        return trials_of(loader, machine, has_step=has_step)

    conductor = Conductor(plan, seconds * _LOOP)
    error = _conduct(subject, conductor, seconds * _LOOP, notes)
    loader = conductor.loader
    if loader is None:
        raise PenstockError(
            f"the function ended before its loop began ({error or 'it took too long'}); mend it, or give more --seconds"
        )
    trials, step = conductor.trials(), conductor.witness.look() if conductor.has_step else None
    notes.until = time.perf_counter() + seconds * (1 - _LOOP) * _LATE + 2.0
    parts = _Parts(loader, seconds, notes)
    parts.measure(conductor.batch)
    return Examination(
        name=name or type(loader.dataset).__name__,
        machine=limits.machine(),
        settings=settings_of(loader),
        has_step=conductor.has_step,
        trials=trials,
        repeats_itself=conductor.repeats_itself,
        beginnings=conductor.beginnings,
        asked=conductor.asked,
        workers=conductor.crew.look(),
        step=step,
        hang=conductor.hang,
        error=error,
        wall_s=time.perf_counter() - began,
        notes=tuple(notes.lines),
        **parts.found,
    )


def _conduct(subject: Any, conductor: Conductor, seconds: float, notes: _Notes) -> str:
    """Run the loop to the end of all trials; return the exception that ended it sooner, in one line."""
    error = ""
    try:
        with at_most(_PREPARING_S, EnoughError, conductor.tick):
            run(subject, conductor)
    except EnoughError:
        if not any(trial.stretches for trial in conductor.trials()):
            notes.lines.append(f"the loop: it did not get through its first batches in {seconds:.0f} s")
    except PenstockError:
        raise
    except Exception as raised:
        error = _one_line(raised)
    finally:
        with contextlib.suppress(EnoughError), at_most(_CLOSING_S, EnoughError):
            conductor.close()
    return error


class _Parts:
    """Measures the parts of one loader."""

    def __init__(self, loader: DataLoader[Any], seconds: float, notes: _Notes) -> None:
        self._loader = loader
        self._seconds = seconds
        self._notes = notes
        self.found: dict[str, Any] = {}

    def measure(self, batch: Any) -> None:
        """Measure all of them."""
        loader, seconds, attempt = self._loader, self._seconds, self._notes.attempt
        own = settings_of(loader)
        forked = own.start_method == "fork"
        if forked and not torch.accelerator.is_available():
            taken = seconds * _GROWTH
            self.found["growth"] = attempt("a worker's memory", lambda: growth(loader, taken), taken + 1.0)
        if own.num_workers and own.start_method and not forked:
            self.found["pickled"] = attempt("the dataset's pickle", self._pickled, seconds * _PICKLE * 2)
        inspection = Inspection(loader, seconds * _SAMPLES)
        attempt("samples in this process", inspection.run, seconds * _SAMPLES)
        self.found["samples"] = attempt("what samples cost", inspection.costs, 2.0)
        self.found["shrinking"] = inspection.shrinking()
        if not inspection.samples and not inspection.error:
            self._notes.lines.append("samples in this process: not one came in time; a sample takes very long")
        if inspection.error:
            self._notes.lines.append(f"samples in this process: {inspection.error}")
        if inspection.samples and own.num_workers:
            taken = seconds * _HANDING
            self.found["transport_s"] = attempt(
                "handing over", lambda: handing_s(loader, inspection.samples, taken), taken + 4.0
            )
        if inspection.samples and not own.is_iterable:
            self.found["threads"] = attempt("threads", self._threads, seconds * _LOCK + 2.0)
        self.found["transfer_s"] = attempt("moving a batch", lambda: _transfer_s(batch), 2.0)

    def _pickled(self) -> Pickled:
        return pickled(self._loader.dataset, self._seconds * _PICKLE)

    def _threads(self) -> Threads:
        return threads_pay(self._loader, 2, self._seconds * _LOCK)


def _transfer_s(batch: Any) -> float | None:
    """Return the median seconds to copy `batch` to the accelerator; None without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if device is None or not tensors:
        return None
    taken = []
    for _ in range(5):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for tensor in tensors:
            tensor.to(device)
        torch.accelerator.synchronize()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[2]


def _one_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__) if error.__traceback__ is not None else []
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = str(error).strip().splitlines()[-1:] or [""]
    kind = type(error).__name__
    return f"{text[0] if text[0].startswith(kind) else f'{kind}: {text[0]}'}{where}"
