"""The one sentence that a person should remember of a run, and the one below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.core.stats import LoaderStatistics
from penstock.observe import rates
from penstock.observe.record import LoaderRecord, RunRecord
from penstock.observe.wording import ratio_text, share_text, time_text

Tone = Literal["good", "bad", "plain"]

_HIDDEN = 0.05
"""A step that waits less than this share of the time has nothing to gain worth the work."""

_NEARLY_HIDDEN = 0.15
"""Below this there is something to gain, and no reason to speak of a bottleneck."""

_MOSTLY = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """What to remember."""

    text: str
    """One sentence."""

    more: str
    """Another one that says what follows from it; may be empty."""

    tone: Tone
    """Whether it is good news."""


def headline(record: RunRecord) -> Headline:
    """Return what `record` comes to."""
    used = [loader for loader in record.loaders if loader.statistics.batches]
    every = [loader.statistics for loader in used]
    loop_s = sum(map(rates.loop_s, every))
    if not every or not loop_s:
        return Headline(
            text="No batch was loaded through a DataLoader.",
            more="There is nothing to say about loading: the program ended before its first batch, or loads its data "
            "by other means.",
            tone="plain",
        )
    waited = sum(map(rates.loading_s, every)) / loop_s
    if waited < _HIDDEN:
        return Headline(
            text=f"Loading is hidden: your step waited for data {share_text(waited)} of the time.",
            more="The loop is as fast as its step. A faster loader would not change that.",
            tone="good",
        )
    if waited < _NEARLY_HIDDEN:
        return Headline(
            text=f"Loading is nearly hidden: your step waited for data {share_text(waited)} of the time.",
            more=_at_best(waited) + _where(used),
            tone="plain",
        )
    return Headline(
        text=f"Your step waited for data {share_text(waited)} of the time; {_cause(every)}.",
        more=_at_best(waited) + _where(used),
        tone="bad",
    )


def _at_best(waited: float) -> str:
    if waited > 0.99:
        return "The loop did nearly nothing but load: its speed is the loader's."
    return (
        f"If loading cost nothing, the loop would run at {ratio_text(1 / (1 - waited))} its speed: that is the most "
        "that a change of the loader can bring."
    )


def _where(used: list[LoaderRecord]) -> str:
    """Return words for the loader with most of the waiting, where there are several."""
    worst = max(used, key=lambda loader: rates.loading_s(loader.statistics))
    waiting_s = sum(rates.loading_s(loader.statistics) for loader in used)
    if len(used) == 1 or rates.loading_s(worst.statistics) < _MOSTLY * waiting_s:
        return ""
    share = share_text(rates.waited_share(worst.statistics))
    return f" Most of the waiting was in the loop over {worst.name}, {share} of its time."


def _cause(every: list[LoaderStatistics]) -> str:
    worst = max(every, key=rates.loading_s)
    stages, loading_s = worst.stages, rates.loading_s(worst)
    starting_s = worst.first_batch_s * max(1, worst.epochs)
    if starting_s > _MOSTLY * loading_s:
        return f"most of that is the first batch of an epoch, {time_text(worst.first_batch_s)} each time"
    if worst.body == "inline":
        what = "reads and decodes" if stages.fetch_s >= stages.collate_s else "collates"
        return f"without workers, the loop {what} its samples by itself"
    if stages.transport_s > _MOSTLY * loading_s:
        return "handing batches over is the bottleneck"
    if stages.fetch_s >= stages.collate_s:
        return "reading and decoding in the workers is the bottleneck"
    return "putting samples together (collate) is the bottleneck"
