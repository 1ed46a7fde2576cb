"""The headline of a run: the main result in one sentence, and the consequence in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.observe.record import rates
from penstock.observe.record.formatting import percent_text, ratio_text, time_text
from penstock.observe.record.group_loaders import group_uncounted, iterator_text
from penstock.observe.record.run_record import LoaderRecord, RunRecord

Tone = Literal["good", "bad", "plain"]

_HIDDEN = 0.05
"""Below this stall fraction, a faster loader gains nothing worth the work."""

_NEARLY_HIDDEN = 0.15
"""Below this stall fraction, there is something to gain, but loading is not the bottleneck."""

_MOSTLY = 0.6


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
    used = [loader for loader in record.loaders if loader.statistics.batches]
    every = [loader.statistics for loader in used]
    loop_s = sum(map(rates.loop_s, every))
    if not every and group_uncounted(record.loaders):
        return Headline(
            text="No batch was counted: the program's loaders have iterators of their own, which were left alone.",
            more="",
            tone="plain",
        )
    if not every or not loop_s:
        return Headline(
            text="No batch was loaded through a DataLoader.",
            more="The program ended before its first batch, or does not load its data through a DataLoader.",
            tone="plain",
        )
    waited = sum(map(rates.loading_s, every)) / loop_s
    if waited < _HIDDEN:
        return Headline(
            text=f"Loading is hidden: your step waited for data {percent_text(waited)} of the time.",
            more="The loop is as fast as its step. A faster loader would not change that.",
            tone="good",
        )
    if waited < _NEARLY_HIDDEN:
        return Headline(
            text=f"Loading is nearly hidden: your step waited for data {percent_text(waited)} of the time.",
            more=_possible_gain(waited) + _slowest_loader(used),
            tone="plain",
        )
    return Headline(
        text=f"Your step waited for data {percent_text(waited)} of the time; {_cause_of_stall(used)}.",
        more=_possible_gain(waited) + _slowest_loader(used),
        tone="bad",
    )


def _possible_gain(waited: float) -> str:
    if waited > 0.99:
        return "The loop did little but load: its speed is the loader's."
    return (
        f"If loading took no time, the loop would run at {ratio_text(1 / (1 - waited))} its speed. No change of the "
        "loader can gain more."
    )


def _slowest_loader(used: list[LoaderRecord]) -> str:
    """Name the loader that caused most of the stall, if there are several."""
    worst = max(used, key=lambda loader: rates.loading_s(loader.statistics))
    waiting_s = sum(rates.loading_s(loader.statistics) for loader in used)
    if len(used) == 1 or rates.loading_s(worst.statistics) < _MOSTLY * waiting_s:
        return ""
    share = percent_text(rates.stall_fraction(worst.statistics))
    return f" Most of the waiting was in the loop over {worst.label}, {share} of its time."


def _cause_of_stall(used: list[LoaderRecord]) -> str:
    loader = max(used, key=lambda loader: rates.loading_s(loader.statistics))
    worst = loader.statistics
    stages, loading_s = worst.stages, rates.loading_s(worst)
    starting_s = worst.first_batch_s * max(1, worst.epochs)
    if starting_s > _MOSTLY * loading_s:
        return f"most of that is the first batch of an epoch, {time_text(worst.first_batch_s)} each time"
    if loader.is_watched:
        return f"its loader has an iterator that is not penstock's ({iterator_text(loader)})"
    if worst.worker_type == "inline":
        what = "reads and decodes" if stages.fetch_s >= stages.collate_s else "collates"
        return f"without workers, the loop {what} its samples itself"
    if stages.transport_s > _MOSTLY * loading_s:
        return "transport of batches is the bottleneck"
    if stages.fetch_s >= stages.collate_s:
        return "reading and decoding in the workers is the bottleneck"
    return "collating samples is the bottleneck"
