"""Causes that make a loop fail, hang or train on the wrong samples."""

from __future__ import annotations

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import place_of
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.finding import Finding

_ONE_LABEL_SAMPLES = 64
"""Samples: of two equally frequent classes, one is missing by chance once in 1e19."""

_SHOWN_INDICES = 8


@cause("fails")
def fails(measured: Measurements) -> Finding | None:
    """The loop raised an exception."""
    if not measured.error:
        return None
    return Finding(
        name="fails",
        cause="The loop ended with an exception while it was measured.",
        evidence=measured.error,
        remedy="fix the exception first; the report below has what was measured before it",
    )


@cause("same-noise", "worker_noise")
def same_noise(measured: Measurements) -> Finding | None:
    """Workers draw the same random numbers."""
    noise = required(measured.worker_noise)
    growth = measured.copy_on_write
    if not (noise.same_in_workers or noise.same_in_epochs) or (growth is not None and growth.growing_attribute):
        return None  # a dataset that remembers what it has made returns something else each time without being random
    where = "in every worker" if noise.same_in_workers else "again in every epoch"
    return Finding(
        name="same-noise",
        cause=f"Samples are random, and the random numbers are the same {where}: there is less variety than it seems.",
        evidence=(
            "a sample that was made twice differed inside a worker, and its first and second version were equal "
            + ("in two workers" if noise.same_in_workers else "in two epochs")
            + (": worker_init_fn seeds them alike, or " if noise.has_init_fn else ": ")
            + "workers are copies of a generator that was made before them"
        ),
        remedy=(
            "worker_init_fn: seed with torch.initial_seed() % 2**32, which differs by worker and epoch, or leave it out"
            if noise.has_init_fn
            else "draw from torch's or NumPy's global generator (torch.rand, numpy.random.rand), which every worker "
            "seeds differently in each epoch; or make the dataset's own generator in the worker, seeded with "
            "torch.initial_seed(), when it is first used"
        ),
    )


@cause("constant-seed", "samples")
def constant_seed(measured: Measurements) -> Finding | None:
    """Every sample gives a generator the same seed."""
    found = required(measured.samples).constant_seed
    if found is None:
        return None
    return Finding(
        name="constant-seed",
        cause="Every sample seeds a generator with the same number, so all samples get the same random numbers.",
        evidence=f"seed {found.seed} in each of {found.samples} different samples: {found.line}",
        remedy=(
            f"{place_of(found.line)}: take it out; workers seed the global generators of Python, NumPy and "
            "torch, differently in each epoch. To repeat a run, seed once, before the loader is made"
        ),
    )


@cause("values-not-finite", "samples")
def values_not_finite(measured: Measurements) -> Finding | None:
    """Samples hold NaN or infinite values."""
    samples, step = required(measured.samples), measured.step_calls
    if not samples.not_finite or (step is not None and step.leaves_gaps_out):
        return None
    shown = ", ".join(map(repr, samples.not_finite[:_SHOWN_INDICES]))
    return Finding(
        name="values-not-finite",
        cause="Some samples have NaN or infinite values, and one of them makes the loss of its batch NaN.",
        evidence=f"dataset[{shown}{', …' if len(samples.not_finite) > _SHOWN_INDICES else ''}], of the first samples",
        remedy="find what divides by zero or is missing in these samples; leave them out, or fill the gaps",
    )


@cause("stream-not-sharded")
def stream_not_sharded(measured: Measurements) -> Finding | None:
    """Every worker of an IterableDataset returns the same samples."""
    if not measured.stream_repeats:
        return None
    return Finding(
        name="stream-not-sharded",
        cause="Every worker returns the same samples: the stream is not split between workers, so an epoch repeats it.",
        evidence=f"the first batches of the first two of {measured.settings.num_workers} workers were equal",
        remedy=(
            "split it in __iter__: info = torch.utils.data.get_worker_info(), then "
            "itertools.islice(samples, info.id, None, info.num_workers)"
        ),
    )


@cause("one-label", "one_label")
def one_label(measured: Measurements) -> Finding | None:
    """The first samples all have the same label."""
    seen, settings = required(measured.one_label), measured.settings
    step = measured.step_calls
    is_unused = step is not None and step.steps > 0 and not step.uses_labels
    if seen.samples < _ONE_LABEL_SAMPLES or (is_unused and settings.shuffles):
        return None  # the labels of some data are one number, and are never used
    if settings.shuffles:
        remedy = "look at what the dataset returns as label: dataset[0][1], or its entry of that name"
    elif settings.is_iterable:
        remedy = "let the stream mix the classes: interleave their files, or shuffle in a buffer that spans several"
    else:
        remedy = "shuffle=True"
    return Finding(
        name="one-label",
        cause=f"{'The samples of each batch' if seen.labels > 1 else 'The first samples'} all have the same label"
        + ("." if settings.shuffles else ": the dataset is sorted by class, and the loader does not shuffle."),
        evidence=f"{seen.samples} samples in {seen.labels} runs of one label each"
        if seen.labels > 1
        else f"{seen.samples} samples, all of them with the label {seen.label:g}",
        remedy=remedy,
        is_uncertain=step is None or not step.uses_labels,
    )
