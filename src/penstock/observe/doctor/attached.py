"""What a running program does, seen from outside: `penstock doctor --pid N`.

Nothing is tried in a program that runs on its own, so this shows where the time goes, and no gains: how long the loop
waits for its loader, what its workers do meanwhile, and which lines of the user's code they are at.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.core.user_code import is_users
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.probes.process_stacks import Frame, ProcessStacks, Stack

_HUNG_FRACTION = 0.95
"""Of the loop's time: a loop that waits for less still gets batches."""

_SHOWN_LINES = 4
_SHOWN_FRAMES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the user's code."""

    where: str
    """As in "train.py:12 (__getitem__)"."""

    fraction: float
    """Of the time of the process or processes that it was seen in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedProgram:
    """What was seen of one program."""

    pid: int
    command: str
    cores: int
    """That this process may use."""

    samples: int
    """How often the program itself was looked at."""

    wait_fraction: float | None
    """Of its time, what it waited for batches; None if it never asked for one."""

    step_lines: tuple[Line, ...]
    """Where it was when it did not wait."""

    loading_lines: tuple[Line, ...]
    """Where the dataset's code was: in the workers, or in the program itself."""

    workers: int
    """Worker processes."""

    busy_fraction: float | None
    """Of the workers' time, what they made samples; None without workers."""

    stuck: tuple[tuple[int, tuple[str, ...]], ...]
    """Workers that stood at the same line of the dataset's code every time: process, and their innermost calls."""


def summarize(found: tuple[ProcessStacks, ...]) -> AttachedProgram:
    """Return what the stacks of a program (the first) and its descendants show."""
    program, *others = found
    workers = [one for one in others if any(_worker_stack(stack) is not None for stack in one.counts)]
    samples = sum(program.counts.values())
    waiting = Counter({stack: count for stack, count in program.counts.items() if _waits(stack)})
    steps = Counter({stack: count for stack, count in program.counts.items() if not _waits(stack)})
    making: Counter[Stack] = Counter()
    for worker in workers:
        for stack, count in worker.counts.items():
            inner = _worker_stack(stack) or ()
            if any(map(_is_users, inner)):
                making[inner] += count
    looked = sum(sum(worker.counts.values()) for worker in workers)
    return AttachedProgram(
        pid=program.pid,
        command=program.command,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        samples=samples,
        wait_fraction=waiting.total() / samples if waiting else None,
        step_lines=_lines(steps, samples),
        loading_lines=_lines(making, looked) if workers else _lines(waiting, samples, after=_is_next),
        workers=len(workers),
        busy_fraction=making.total() / looked if looked else None,
        stuck=tuple(entry for worker in workers if (entry := _stuck(worker)) is not None),
    )


def render(seen: AttachedProgram) -> str:
    """Return it as lines of text; the conclusion comes first."""
    lines = [f"process {seen.pid}: {_conclusion(seen)}", ""]
    if seen.wait_fraction is not None:
        rest = 1 - seen.wait_fraction
        lines.append(
            f"  the loop waits for batches {seen.wait_fraction:.0%} of its time, and does its own work {rest:.0%}"
        )
    lines += [f"    {line.fraction:4.0%}  {line.where}" for line in seen.step_lines]
    if seen.busy_fraction is not None:
        lines.append(
            f"  {seen.workers} worker{'s' * (seen.workers > 1)} on {seen.cores} cores make samples "
            f"{seen.busy_fraction:.0%} of their time"
        )
    elif seen.loading_lines:
        lines.append("  there are no workers: samples are made while the loop waits")
    lines += [f"    {line.fraction:4.0%}  {line.where}" for line in seen.loading_lines]
    for pid, calls in seen.stuck:
        lines += [f"  worker {pid} stood at one line all the time, its innermost call first:"]
        lines += [f"          {call}" for call in calls]
    lines += ["", f"  {seen.command}", f"  looked at {seen.samples} times, from outside; nothing was tried"]
    return "\n".join(lines) + "\n"


def _conclusion(seen: AttachedProgram) -> str:
    waits, busy = seen.wait_fraction, seen.busy_fraction
    if waits is None:
        return "it asked no loader for a batch while it was looked at"
    if waits > _HUNG_FRACTION and seen.workers and len(seen.stuck) == seen.workers:
        return "its workers hang, or one sample takes very long: all of them stand at one line"
    if waits < thresholds.STALL_FRACTION:
        return "the loop is bound by its own work; loading is hidden behind it"
    if busy is None:
        return "loading is the bottleneck, in the training process itself: num_workers, or the lines below"
    if busy >= thresholds.BUSY_WORKERS:
        more = "more workers, or " if seen.workers < seen.cores else ""
        return f"loading is the bottleneck: its workers are busy, so {more}the lines below"
    return "the loop waits while its workers do too: batches take their time on the way (collate, size, start-up)"


def _lines(stacks: Counter[Stack], of: int, after: Callable[[Frame], bool] | None = None) -> tuple[Line, ...]:
    found: Counter[str] = Counter()
    for stack, count in stacks.items():
        begin = next((at + 1 for at, frame in enumerate(stack) if after(frame)), 0) if after is not None else 0
        own = [frame for frame in stack[begin:] if _is_users(frame)]
        if own:
            found[_short(own[-1])] += count
    return tuple(Line(where=where, fraction=count / of) for where, count in found.most_common(_SHOWN_LINES))


def _stuck(worker: ProcessStacks) -> tuple[int, tuple[str, ...]] | None:
    if len(worker.counts) != 1:
        return None
    inner = _worker_stack(next(iter(worker.counts))) or ()
    if not any(map(_is_users, inner)):
        return None  # it waits for work
    return worker.pid, tuple(map(_short, inner[: -_SHOWN_FRAMES - 1 : -1]))


def _worker_stack(stack: Stack) -> Stack | None:
    """Return the calls inside of a worker's loop; None for a process that is no worker."""
    begins = [at for at, frame in enumerate(stack) if _is_worker_loop(frame)]
    return stack[begins[-1] + 1 :] if begins else None


def _is_worker_loop(frame: Frame) -> bool:
    is_torchs = frame.function == "_worker_loop" and _ends(frame, "torch/utils/data/_utils/worker.py")
    return is_torchs or _ends(frame, "penstock/loader/workers/process_main.py")


def _waits(stack: Stack) -> bool:
    return any(map(_is_next, stack))


def _is_next(frame: Frame) -> bool:
    is_loaders = _ends(frame, "torch/utils/data/dataloader.py") or _ends(frame, "penstock/loader/iterator.py")
    return is_loaders and frame.function.endswith(("__next__", "__iter__"))


def _ends(frame: Frame, path: str) -> bool:
    return Path(frame.file).as_posix().endswith(path)


def _is_users(frame: Frame) -> bool:
    return is_users(frame.file)


def _short(frame: Frame) -> str:
    return f"{Path(frame.file).name}:{frame.line} ({frame.function})"
