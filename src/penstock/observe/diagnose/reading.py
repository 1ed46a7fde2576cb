"""What several findings read from an examination: how much the loop waits, and what a batch costs in each part."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.observe.examination import Examination
from penstock.observe.trial import AS_IT_IS, FREE, Gain, Trial

WAITS = 0.15
"""A loop that waits for a lesser share of its time has its loading hidden."""


WORTH = 1.1
"""What gains less than this factor is not worth a change."""

_FEW_ITERATORS = 2


def stall_share(found: Examination) -> float:
    """Return the share of the loop's time that loading costs it; 1 when there is no step to hide it.

    On an accelerator a loop may wait for its loader while the device still computes, so there only the trial with free
    loading tells.
    """
    now = found.as_it_is
    if now is None:
        return 0.0
    if not found.has_step:
        return 1.0
    free = found.gain_of(FREE)
    if found.machine.accelerator and free is not None:
        return max(0.0, 1 - 1 / free.median)
    return now.waited_share or 0.0


def loading_matters(found: Examination) -> bool:
    """Return whether the loop would gain by loading faster: it waits, and gains when it need not."""
    share = stall_share(found)
    free = found.gain_of(FREE)
    if free is None:
        return share >= WAITS
    if free.median < WORTH:
        return False
    return share >= 2 * WAITS or (share >= WAITS and free.low > 1.0)


def parts_s(found: Examination) -> Mapping[str, float]:
    """Return seconds per batch of each part of loading, divided by the workers that share it."""
    samples, own = found.samples, found.settings
    if samples is None:
        return {}
    at_once = max(1.0, min(float(own.num_workers), found.machine.usable_cores))
    fetch_s, collate_s = samples.fetch_s, samples.collate_s / at_once
    if samples.storage_share is None:
        parts = {"dataset": fetch_s / at_once}
    else:
        parts = {
            # Who waits needs no core.
            "storage": samples.storage_share * fetch_s / max(1, own.num_workers),
            "decode": (samples.decode_share or 0.0) * fetch_s / at_once,
            "transform": (samples.transform_share or 0.0) * fetch_s / at_once,
        }
    parts["collate"] = collate_s
    handing_s = handing_of(found)
    if handing_s is not None:
        parts["transport"] = max(0.0, handing_s - collate_s)
    startup_s = startup_of(found)
    if startup_s is not None and found.settings.length:
        parts["start-up"] = startup_s / min(found.settings.length, batches_of_iterator(found))
    return parts


def batches_of_iterator(found: Examination) -> float:
    """Return how many batches the program takes from one iterator: one, with `next(iter(loader))` in a loop."""
    return max(1.0, found.asked / found.beginnings) if found.beginnings > _FEW_ITERATORS else math.inf


def handing_of(found: Examination) -> float | None:
    """Return what handing a batch over takes, collate included; never more than the whole loop took for one."""
    now = found.as_it_is
    if found.transport_s is None or now is None or now.batch_s is None:
        return found.transport_s
    return min(found.transport_s, now.batch_s)


def startup_of(found: Examination) -> float | None:
    """Return the seconds that an epoch's start costs beyond making its first batch; None where nothing."""
    own, samples = found.settings, found.samples
    now = next((trial for trial in found.trials if trial.name == AS_IT_IS), None)
    if not own.start_method or own.persistent_workers or now is None or now.startup_s is None:
        return None
    made_s = samples.fetch_s + samples.collate_s if samples else 0.0
    return max(0.0, now.startup_s - made_s)


def slowed(found: Examination) -> float | None:
    """Return how many times as long the step takes beside its loader as with free loading; None where unknown."""
    now, free = found.as_it_is, found.trial(FREE)
    if now is None or free is None or found.machine.accelerator:
        return None
    factors = sorted(
        (one.step_s / one.batches) / (other.step_s / other.batches)
        for one, other in zip(now.stretches, free.stretches, strict=False)
        if other.step_s
    )
    return factors[len(factors) // 4] if len(factors) > 2 else None  # all but the luckiest rounds agree on so much


def takes_cores(found: Examination) -> bool:
    """Return whether step and workers together want more cores than there are, and the loop loses a good part by it.

    A step beside its loader also frees the last batch's memory, which with free loading it never does: not meant here.
    """
    now, free, own = found.as_it_is, found.trial(FREE), found.settings
    if now is None or free is None or not own.num_workers:
        return False
    if own.num_workers + found.machine.intra_op_threads <= found.machine.usable_cores:
        return False
    lost_s = sum(one.step_s for one in now.stretches) / sum(one.batches for one in now.stretches) - (
        free.batch_s or 0.0
    )
    return lost_s > 0.2 * (now.batch_s or 0.0)


def factor(gain: Gain | None) -> float | None:
    """Return the gain as a finding states it: none where rounds disagree."""
    return gain.median if gain is not None and gain.is_clear else None


def trial_text(found: Examination, trial: Trial) -> str:
    """Return what a trial showed, in words."""
    gain = found.gain_of(trial.name)
    if gain is None:
        return f"{trial.name}: not tried"
    return f"{trial.name}: {gain.median:.2f} times as fast ({gain.low:.2f} … {gain.high:.2f} in {gain.rounds} rounds)"
