"""Causes that start workers too often: iterators that are thrown away, and epochs that are too short."""

from __future__ import annotations

import math

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import epoch_startup_s, other_startup_s
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.finding import Finding

_BATCHES_PER_ITERATOR = 2
"""Batches: a loop that takes no more from an iterator pays the workers' start for almost every batch."""
_OTHER_STARTS = 2
"""Starts: a loop that was started once shows no repetition."""
_OTHER_STARTUP_S = 0.05
"""Seconds: a start that takes less is not worth a change, once per validation."""


@cause("iterator-recreated")
def iterator_recreated(measured: Measurements) -> Finding | None:
    """`next(iter(loader))` in a loop starts the workers again for every batch."""
    iterators, batches = measured.iterators_created, measured.batches_requested
    is_anew = measured.loaders_created > thresholds.FEW_ITERATORS
    own = measured.settings
    if not is_recreated(iterators, batches, None if is_anew else own.length):
        return None
    startup_s = epoch_startup_s(measured)
    cost = f"; each costs {startup_s * 1e3:.0f} ms and the batches that were prefetched" if startup_s else ""
    what = "loader" if is_anew else "iterator"
    evidence = f"{measured.loaders_created if is_anew else iterators} {what}s for {batches} batches{cost}"
    return iterator_begun_anew(what, evidence, has_workers=own.num_workers > 0)


def is_recreated(iterators: int, batches: int, length: int | None) -> bool:
    """Return whether a loader of `length` batches was begun anew for almost each that was taken.

    >>> is_recreated(40, 40, 100), is_recreated(2, 200, 100), is_recreated(40, 40, 1)
    (True, False, False)
    """
    if iterators <= thresholds.FEW_ITERATORS or batches > _BATCHES_PER_ITERATOR * iterators:
        return False
    return length is None or length > _BATCHES_PER_ITERATOR  # otherwise its epochs have no more batches


def iterator_begun_anew(what: str, evidence: str, *, has_workers: bool, loader: str = "") -> Finding:
    """Return the finding on a loop that makes a new `what`, "iterator" or "loader", for almost every batch."""
    wasted = "starts and stops all workers" if has_workers else "begins a new epoch"
    is_anew = what == "loader"
    return Finding(
        name="iterator-recreated",
        cause=f"The loop creates a new {what} for almost every batch, which {wasted} each time.",
        evidence=evidence,
        remedy=(
            f"{'make the loader once, before the loop, and ' if is_anew else ''}create {'its' if is_anew else 'the'} "
            "iterator once: `batches = iter(loader)` before the loop, `next(batches)` in it; or loop with "
            "`for batch in loader:`"
        ),
        loader=loader,
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
    is_often = other_startup_s(measured) > thresholds.OTHER_STARTUP_FRACTION * batch_s
    slow = [
        loop
        for loop in measured.other_loops
        if loop.starts >= _OTHER_STARTS
        and (is_often or (loop.startup_s >= _OTHER_STARTUP_S and not loop.batches_between))
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


@cause("short-epochs", "as_is")
def short_epochs(measured: Measurements) -> Finding | None:
    """Workers are started for every epoch, and an epoch is short."""
    startup_s, own, now = epoch_startup_s(measured), measured.settings, required(measured.as_is)
    batch_s = now.batch_within_epoch_s
    if startup_s is None or not batch_s or not own.length:
        return None
    epoch_s = startup_s + own.length * batch_s
    if startup_s / epoch_s < thresholds.STARTUP_FRACTION:
        return None
    return Finding(
        name="short-epochs",
        cause="Workers are started again for every epoch, and an epoch is short.",
        evidence=(
            f"starting them takes {startup_s * 1e3:.0f} ms ({own.start_method}), an epoch of {own.length} batches "
            f"takes {epoch_s * 1e3:.0f} ms"
        ),
        remedy="persistent_workers=True",
        gain=epoch_s / (own.length * batch_s) if any(window.start_s for window in now.windows) else None,
    )
