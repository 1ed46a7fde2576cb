"""Causes that start workers too often: iterators that are thrown away, and epochs that are too short."""

from __future__ import annotations

import math
from itertools import pairwise

from penstock.core.units import size_text
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import (
    clear_factor,
    epoch_startup_s,
    is_unclear,
    other_startup_s,
    step_alone,
)
from penstock.observe.doctor.content_results import SingleCosts, SingleSamples
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import PERSISTENT, Gain, Trial
from penstock.observe.record.finding import Finding


@cause("iterator-recreated")
def iterator_recreated(measured: Measurements) -> Finding | None:
    """`next(iter(loader))` in a loop starts the workers again for every batch."""
    iterators, batches = measured.iterators_created, measured.batches_requested
    if iterators <= THRESHOLDS.few_iterators or batches > THRESHOLDS.batches_per_iterator * iterators:
        return None
    is_anew = measured.loaders_created > THRESHOLDS.few_iterators
    own = measured.settings
    if own.length is not None and own.length <= THRESHOLDS.batches_per_iterator and not is_anew:
        return None  # its epochs have no more batches
    startup_s = epoch_startup_s(measured)
    cost = f"; each costs {startup_s * 1e3:.0f} ms and the batches that were prefetched" if startup_s else ""
    what = "loader" if is_anew else "iterator"
    wasted = "starts and stops all workers" if own.num_workers else "begins a new epoch"
    return Finding(
        name="iterator-recreated",
        cause=f"The loop creates a new {what} for almost every batch, which {wasted} each time.",
        evidence=f"{measured.loaders_created if is_anew else iterators} {what}s for {batches} batches{cost}",
        remedy=(
            f"{'make the loader once, before the loop, and ' if is_anew else ''}create {'its' if is_anew else 'the'} "
            "iterator once: `batches = iter(loader)` before the loop, `next(batches)` in it; or loop with "
            "`for batch in loader:`"
        ),
    )


@cause("cycled")
def cycled(measured: Measurements) -> Finding | None:
    """`itertools.cycle(loader)` keeps the batches of the first epoch, and repeats them."""
    if not measured.is_cycled:
        return None
    return Finding(
        name="cycled",
        cause="itertools.cycle keeps every batch of the first epoch in memory, and returns the same ones ever after.",
        evidence="the loop's batches come from an itertools.cycle over this loader: no new order, no new random crop",
        remedy="let a generator begin a new epoch: `while True: yield from loader`",
    )


@cause("collected-first")
def collected_first(measured: Measurements) -> Finding | None:
    """`list(loader)` makes all batches of an epoch before its first step."""
    if not measured.collected_at:
        return None
    return Finding(
        name="collected-first",
        cause="All batches of an epoch are made and kept before its first step, so no step hides any loading.",
        evidence=f"{measured.collected_at}; the loader was measured alone",
        remedy="loop over the loader itself: `for batch in loader:`"
        + ("" if measured.collects_again else "; or change nothing where that is done once, to keep a small dataset"),
        is_uncertain=not measured.collects_again,
    )


@cause("same-order", "epoch_orders")
def same_order(measured: Measurements) -> Finding | None:
    """A sampler that shuffles has the same order in every epoch."""
    seen = required(measured.epoch_orders)
    if seen.is_sorted:
        return None
    evidence = f"the program began {seen.epochs} epochs, and its {seen.sampler} drew the same indices in each of them"
    return order_that_repeats(seen.sampler, evidence, is_uncertain=not (seen.is_meant_to_change and seen.is_all))


def order_that_repeats(sampler: str, evidence: str, *, is_uncertain: bool = False, loader: str = "") -> Finding:
    """Return the finding that a sampler of this class, which shuffles, repeats its order."""
    return Finding(
        name="same-order",
        loader=loader,
        cause="The sampler shuffles, and every epoch has the same order.",
        evidence=evidence,
        remedy=(
            "loader.sampler.set_epoch(epoch) before each epoch"
            if sampler == "DistributedSampler"
            else "seed once, before the epochs: a generator, or torch.manual_seed, that is seeded again in each epoch "
            "draws the same order"
        ),
        is_uncertain=is_uncertain,
    )


@cause("not-shuffled", "epoch_orders", "step_calls")
def not_shuffled(measured: Measurements) -> Finding | None:
    """A training loop reads its dataset in order, in every epoch."""
    seen = required(measured.epoch_orders)
    if not seen.is_sorted or not required(measured.step_calls).trains:
        return None
    return Finding(
        name="not-shuffled",
        cause="The loop trains on the samples in the order of the dataset, the same in every epoch.",
        evidence=f"the program began {seen.epochs} epochs, each with the first samples of {measured.settings.dataset}",
        remedy=(
            "shuffle=True"
            + (" in the DistributedSampler" if seen.sampler == "DistributedSampler" else "")
            + ", or change nothing where the order matters or was shuffled before"
        ),
        is_uncertain=True,
    )


@cause("other-loader-restarted")
def other_loader_restarted(measured: Measurements) -> Finding | None:
    """The workers of another loop, such as a validation, are started again for each of its passes."""
    batch_s = (measured.as_is.batch_s if measured.as_is is not None else None) or math.inf
    is_often = other_startup_s(measured) > THRESHOLDS.other_startup_fraction * batch_s
    slow = [
        loop
        for loop in measured.other_loops
        if loop.starts >= THRESHOLDS.other_starts
        and (is_often or (loop.startup_s >= THRESHOLDS.other_startup_s and not loop.batches_between))
    ]
    if not slow:
        return None
    loop = max(slow, key=lambda one: one.startup_s)
    is_anew = loop.loaders > 1
    after = f", after epochs of {loop.batches_between:.0f} batches" if loop.batches_between else ""
    return Finding(
        name="other-loader-restarted",
        cause="Another loop of the program"
        + (" makes a new loader for every pass, and its workers are started each time." if is_anew else "")
        + ("" if is_anew else ", such as a validation, starts its workers again for every pass."),
        evidence=(
            f"the {loop.num_workers} workers of a loader of {loop.dataset} were started {loop.starts} times"
            f"{f', for {loop.loaders} loaders' if is_anew else ''}{after}; the first batch came after "
            f"{loop.startup_s:.2f} s"
        ),
        remedy=(
            "make its iterator once, before the loop: `others = iter(loader)`, then `next(others)` in each step, and "
            "another iterator where it ends"
            if not is_anew and measured.batches_requested < 2 * loop.starts
            else ("make that loader once, before the loop, with " if is_anew else "") + "persistent_workers=True"
        ),
    )


@cause("validates-often", "as_is")
def validates_often(measured: Measurements) -> Finding | None:
    """A pass over another loader, after every few steps, takes a large part of the program's time."""
    own, now = measured.settings, required(measured.as_is)
    for one in measured.repeated_passes:
        step_s = now.idle_machine_s if measured.machine.is_busy else now.batch_s
        pass_s, steps_s = one.batches * one.batch_s, one.steps_between * (step_s or math.inf)
        fraction = pass_s / (pass_s + steps_s)
        starts_s = max((loop.startup_s for loop in measured.other_loops), default=0.0)
        if fraction < THRESHOLDS.other_loop_fraction or pass_s < starts_s:  # then "other-loader-restarted" comes first
            continue
        rarer = min(1.0, one.steps_between / own.length) if own.length else 0.0  # once per epoch
        return Finding(
            name="validates-often",
            cause="A pass over another loader, such as a validation, takes a large part of the time, every few steps.",
            evidence=(
                f"{one.batches} batches of {one.dataset} after every {one.steps_between:.0f} steps: about "
                f"{pass_s * 1e3:.0f} ms beside {steps_s * 1e3:.0f} ms of steps, {fraction:.0%} of the time"
                + "; gradients are on meanwhile"
                * one.has_gradients
            ),
            remedy="do it once per epoch, or with a part of the samples"
            + ", and under torch.no_grad(): then no graph is made" * one.has_gradients,
            gain=(pass_s + steps_s) / (steps_s + rarer * pass_s) if one.is_whole else None,
            is_uncertain=not one.is_whole,
        )
    return None


@cause("evaluates-single-samples", "single_samples")
def evaluates_single_samples(measured: Measurements) -> Finding | None:
    """A loader that evaluates was made without a batch size."""
    one, now = required(measured.single_samples), measured.as_is
    if one.costs is not None and now is not None and now.batch_s:
        return _costly_single_samples(one, one.costs, measured, now)
    return Finding(
        name="evaluates-single-samples",
        cause="An evaluation gets one sample after another: its model is called once for each.",
        evidence=(
            f"batch_size=1 of {one.loader}: {one.samples} batches in each pass, beside {one.training_batches} of an "
            "epoch; its samples can be collated"
        ),
        remedy="DataLoader(..., batch_size=256), or as many as fit: without gradients more do than in training",
        is_uncertain=True,  # a model may need one sample after another, as those of a stream
    )


def _costly_single_samples(
    one: SingleSamples, costs: SingleCosts, measured: Measurements, now: Trial
) -> Finding | None:
    """Return the finding if the program gains by larger batches, as they were tried."""
    is_busy, alone = measured.machine.is_busy, step_alone(measured)
    step_s = now.batch_s or math.inf
    if is_busy:  # a step's threads wait for those of others longer than those of single samples
        both = [trial.idle_machine_s for trial in (now, alone) if trial is not None]
        step_s = min(filter(None, both), default=step_s)
    epoch_s = one.training_batches * step_s
    pass_s, other_s = one.samples * costs.sample_s, math.ceil(one.samples / costs.batch_size) * costs.batch_s
    gain = (epoch_s + pass_s) / (epoch_s + other_s)
    pays = gain >= THRESHOLDS.worthwhile_gain
    if not pays and not (is_busy or costs.has_workers):
        return None
    return Finding(
        name="evaluates-single-samples",
        cause="An evaluation gets one sample after another: its model is called once for each.",
        evidence=(
            f"batch_size=1 of {one.loader}: {one.samples} batches of {costs.sample_s * 1e3:.2f} ms in each pass, "
            f"{pass_s:.1f} s after an epoch of about {epoch_s:.1f} s; with batches of {costs.batch_size} it took "
            f"{costs.batch_s * 1e3:.1f} ms for each, {other_s:.1f} s for all"
        ),
        remedy=(
            f"DataLoader(..., batch_size={costs.batch_size}) for it, or more: without gradients more fit than in "
            "training; what it adds up has to count all samples of a batch"
        ),
        gain=gain if pays else None,
        is_uncertain=not pays,
    )


@cause("hooks-grow")
def hooks_grow(measured: Measurements) -> Finding | None:
    """Every epoch registers hooks again, and those of all epochs are called."""
    counts = measured.module_hooks
    if len(counts) < 2 or any(now <= before for before, now in pairwise(counts)):
        return None
    return Finding(
        name="hooks-grow",
        cause="Every epoch registers hooks on modules again, and all of them are called in every step from then on.",
        evidence=f"hooks after the first epoch and at the start of the next ones: {', '.join(map(str, counts))}",
        remedy="register them once, before the epochs; or call remove() of what register_forward_hook returns",
        is_uncertain=len(counts) < 3,
    )


@cause("saves-whole-storages", "saved_storages")
def saves_whole_storages(measured: Measurements) -> Finding | None:
    """A checkpoint holds a view, and `torch.save` writes all that it is a view of."""
    saved = required(measured.saved_storages)
    return Finding(
        name="saves-whole-storages",
        cause="What the program saves has a view of a larger tensor, and all of that is written.",
        evidence=(
            f"torch.save would write {size_text(saved.nbytes)}, and its tensors are "
            f"{size_text(saved.nbytes - saved.unused_nbytes)} of it; the largest rest is that of {saved.name}"
        ),
        remedy="save a copy of the part: tensor.clone()",
    )


@cause("short-epochs", "as_is")
def short_epochs(measured: Measurements) -> Finding | None:
    """Workers are started for every epoch, and an epoch is short."""
    startup_s, own, now = epoch_startup_s(measured), measured.settings, required(measured.as_is)
    batch_s = _within_epoch_s(measured)
    if startup_s is None or not batch_s or not own.length:
        return None
    gain, epoch_s = measured.gain_of(PERSISTENT), startup_s + own.length * batch_s
    is_unseen = now.unseen_startup_s >= THRESHOLDS.unseen_start_fraction * epoch_s
    is_seen = any(window.start_s for window in now.windows)
    # what a trial gained beyond the starts themselves was the machine's
    may_pay = epoch_s / (own.length * batch_s) >= THRESHOLDS.worthwhile_gain
    pays = may_pay and gain is not None and gain.pays(THRESHOLDS.persistent_gain)
    least = THRESHOLDS.unseen_startup_fraction if is_unseen else THRESHOLDS.startup_fraction
    if startup_s / epoch_s < least and not pays:
        return None
    if gain is not None and not is_unseen and _is_no_faster(measured, gain):
        return None
    is_tried = gain is not None and gain.is_clear and not is_unseen
    tried = f"; with persistent workers {required(gain).median:.2f} times as fast" if is_tried and not is_seen else ""
    what = "starting them, and what each builds for its first sample," if is_unseen else "starting them"
    is_guess = batch_s < THRESHOLDS.guessed_batch_fraction * (now.batch_within_epoch_s or 0.0)
    return Finding(
        name="short-epochs",
        cause="Workers are started again for every epoch, and an epoch is short.",
        evidence=(
            f"{what} takes {startup_s * 1e3:.0f} ms ({own.start_method}), an epoch of {own.length} batches "
            f"takes {epoch_s * 1e3:.0f} ms{', on a quiet machine' * is_guess}{tried}"
        ),
        remedy="persistent_workers=True" + ", or build it before the loader is made: workers inherit it" * is_unseen,
        # of windows of the trials some have a start and others none: both were measured, and an epoch has one
        gain=epoch_s / (own.length * batch_s) if is_unseen or is_seen else clear_factor(gain),
        is_measured=gain is not None and not is_unseen and not is_guess and (is_seen or gain.is_clear),
        is_uncertain=is_guess
        or (is_unclear(gain) and not is_unseen and not is_seen and required(gain).median < THRESHOLDS.persistent_gain),
    )


def _within_epoch_s(measured: Measurements) -> float | None:
    """Return seconds per batch without the starts of workers, and without what other programs take of the processors.

    Starts are scaled in the same way: beside a step that others slow down many times over, none would seem to matter.
    """
    now, alone, samples = required(measured.as_is), step_alone(measured), measured.samples
    batch_s = now.batch_within_epoch_s
    if not measured.machine.is_busy or alone is None or batch_s is None:
        return batch_s
    wait_s = now.wait_within_epoch_s or 0.0
    parallel = max(1.0, min(float(measured.settings.num_workers), measured.machine.usable_cores))
    return min(batch_s, max((alone.idle_machine_s or 0.0) + wait_s, samples.batch_s / parallel if samples else 0.0))


def _is_no_faster(measured: Measurements, gain: Gain) -> bool:
    """Return whether the trial with persistent workers speaks against them: it took as long as an epoch with its start.

    Rounds tell that as well where no window of the loop had a start to itself, and all of them may have had one.
    """
    now, persistent = required(measured.as_is), required(measured.trial(PERSISTENT))
    if not any(window.start_s for window in now.windows):
        return gain.is_loss or (gain.is_clear and gain.median < THRESHOLDS.persistent_gain)
    before_s, after_s = now.batch_within_epoch_s or math.inf, persistent.batch_within_epoch_s or 0.0
    starts_s = epoch_startup_s(measured) or 0.0
    return after_s * THRESHOLDS.worthwhile_gain > before_s + starts_s / (measured.settings.length or math.inf)
