"""The headline of a run: the main result in one sentence, and the consequence in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.observe.record.formatting import percent_text, ratio_text, time_text
from penstock.observe.record.group_loaders import group_loaders, group_uncounted, iterator_text
from penstock.observe.record.rates import HIDDEN, gain_without
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.time_parts import cause_of_waiting, most_waited_for

Tone = Literal["good", "bad", "plain"]

_MOSTLY = 0.6
_CHILDREN_CPU_S = 1.0
"""Child processes that used less are no part of the training: compilers, `git`, a resource tracker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The headline, and the sentence below it."""

    text: str
    """One sentence."""

    more: str
    """The consequence; may be empty."""

    tone: Tone
    """Its colour: whether it is good news."""


def headline(record: RunRecord) -> Headline:
    """Return the headline of `record`."""
    used = group_loaders(record.loaders)
    if not used and group_uncounted(record.loaders):
        return Headline(
            text="No batch was counted: the program's loaders have iterators of their own, which were left alone.",
            more="",
            tone="plain",
        )
    if not used or not record.totals.loop_s:
        return Headline(
            text="The program's main process loaded no batch through a DataLoader.",
            more=not_watched(record)
            or "The program ended before its first batch, or does not load its data through a DataLoader.",
            tone="plain",
        )
    waited = record.totals.stall_fraction
    share = f"our step waited for data {percent_text(waited)} of the time"
    if waited < HIDDEN:
        more = "The loop is as fast as its step. A faster loader would not change that."
        return Headline(text=f"Loading is hidden: y{share}.", more=more, tone="good")
    from penstock.observe.doctor import thresholds  # a run without a loader ends sooner without

    more = _possible_gain(waited, "loop" if len(used) == 1 else "loops together") + _slowest_loader(used)
    if waited < thresholds.RUN_STALL_FRACTION:
        return Headline(text=f"Loading is nearly hidden: y{share}.", more=more, tone="plain")
    cause = _cause(most_waited_for(used))
    if waited < 0.5:
        return Headline(text=f"Y{share}, {cause}.", more=more, tone="bad")
    return Headline(text=f"Loading is the bottleneck: y{share}, {cause}.", more=more, tone="bad")


def not_watched(record: RunRecord) -> str:
    """Return a sentence on child processes of the program, which may have loaded data uncounted; empty without any."""
    if record.forks_with_loaders:
        several = record.forks_with_loaders > 1
        return (
            f"{record.forks_with_loaders} child process{'es' if several else ''} of the program used loaders of "
            f"{'their' if several else 'its'} own, which were not watched."
        )
    if not record.totals.batches and record.children_cpu_s >= _CHILDREN_CPU_S:
        return (
            f"Child processes of the program, which computed for {time_text(record.children_cpu_s)}, were not watched."
        )
    return ""


def _possible_gain(waited: float, what: str) -> str:
    if waited > 0.99:
        return "The loop did little but load: its speed is the loader's."
    whose = "its" if what == "loop" else "their"
    return (
        f"If loading took no time, the {what} would run at {ratio_text(gain_without(waited))} {whose} speed. No change "
        "of loading can gain more."
    )


def _slowest_loader(used: list[LoaderRecord]) -> str:
    """Name the loader that was waited for most, if there are several."""
    worst = most_waited_for(used).statistics
    waiting_s = sum(loader.statistics.loading_s for loader in used)
    if len(used) == 1 or worst.loading_s < _MOSTLY * waiting_s:
        return ""
    return (
        f" Most of the waiting was in the loop over {most_waited_for(used).label}, "
        f"{percent_text(worst.stall_fraction)} of its time."
    )


def _cause(loader: LoaderRecord) -> str:
    """Return what was waited for, as the end of a sentence."""
    counted = loader.statistics
    workers = "the loop itself, without workers" if counted.worker_type == "inline" else "the workers"
    from penstock.observe.doctor.worker_estimate import LoopTimes

    match cause_of_waiting(loader):
        case "start":
            if 2 * counted.stages.workers_s > counted.loading_s:
                return "mostly for workers to start and to stop"
            return f"mostly for the first batch of an epoch, {time_text(counted.first_batch_s)} each time"
        case "unknown":
            return f"for a loader whose iterator is not penstock's ({iterator_text(loader)})"
        case "transport":
            return "mostly for the transport of batches"
        case "fetch" if LoopTimes.of(counted).waits:
            return f"mostly for samples that wait themselves, for a disk, a network or a lock, in {workers}"
        case "fetch":
            return f"mostly for reading and decoding in {workers}"
        case "collate":
            return f"mostly for collating samples in {workers}"
