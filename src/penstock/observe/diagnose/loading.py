"""Why loading is slow: one function for each cause. None where it does not apply, or would gain nothing."""

from __future__ import annotations

import math

from penstock.core.units import size_text
from penstock.observe.diagnose.reading import (
    WORTH,
    factor,
    handing_of,
    loading_matters,
    parts_s,
    startup_of,
    trial_text,
)
from penstock.observe.examination import Examination
from penstock.observe.finding import Finding
from penstock.observe.trial import (
    FEWER_WORKERS,
    FREE,
    MORE_WORKERS,
    NO_WORKERS,
    PENSTOCK,
    PERSISTENT,
    PROCESSES,
    THREADS,
)

_SMALL_NBYTES = 4 << 20


def fails(found: Examination) -> Finding | None:
    """The loop raised."""
    if not found.error:
        return None
    return Finding(
        name="fails",
        cause="The loop ended by an exception while it was examined.",
        evidence=found.error,
        remedy="mend it first; what was measured before it is below",
    )


def workers_hang(found: Examination) -> Finding | None:
    """Every worker waits for a thread or a lock that is not there."""
    hang, own = found.hang, found.settings
    if hang is None:
        return None
    is_forked = own.start_method == "fork"
    threaded = f", with {', '.join(hang.libraries)} loaded" if hang.libraries else ""
    why = (
        "; they were forked: threads of the training process, and locks that those held, are not there in a worker "
        "(torch computes in one thread there, and hangs where a worker sets more and the training process has used "
        "several before)"
    )
    return Finding(
        name="workers-hang",
        cause="The workers wait for ever, for a thread or for a lock, and the loop for them.",
        evidence=(
            f"no batch for {hang.waited_s:.0f} s, while all {hang.workers} workers used no processor and waited in a "
            f"lock{threaded}{why if is_forked else ''}"
        ),
        remedy=(
            'multiprocessing_context="forkserver"; or no torch.set_num_threads in workers, and no lock in the dataset '
            "that another thread may hold when workers are started"
            if is_forked
            else "look where they are: py-spy dump --pid of a worker"
        ),
    )


def iterator_made_anew(found: Examination) -> Finding | None:
    """`next(iter(loader))` in a loop starts the workers again for every batch."""
    if found.beginnings < 3 or found.asked > 2 * found.beginnings:
        return None
    startup_s = startup_of(found)
    cost = f"; each costs {startup_s * 1e3:.0f} ms and whatever was loaded ahead" if startup_s else ""
    return Finding(
        name="iterator-made-anew",
        cause="The loop makes a new iterator for almost every batch, and that starts and ends all workers.",
        evidence=f"{found.beginnings} iterators for {found.asked} batches{cost}",
        remedy=(
            "make it once: `batches = iter(loader)` before the loop, `next(batches)` in it (or `for batch in loader:`)"
        ),
    )


def short_epochs(found: Examination) -> Finding | None:
    """Workers are started for every epoch, and an epoch is short."""
    startup_s, now, own = startup_of(found), found.as_it_is, found.settings
    if startup_s is None or now is None or now.batch_s is None or not own.length:
        return None
    gain = found.gain_of(PERSISTENT)
    epoch_s = max(startup_s, own.length * now.batch_s)
    pays = gain is not None and gain.pays(1.15)
    if startup_s / epoch_s < 0.25 and not pays:
        return None
    if gain is not None and gain.is_clear and not pays:
        return None
    tried = f"; with persistent workers {gain.median:.2f} times as fast" if gain is not None else ""
    return Finding(
        name="short-epochs",
        cause="Workers are started anew for every epoch, and an epoch is short.",
        evidence=(
            f"starting takes {startup_s * 1e3:.0f} ms ({own.start_method}), an epoch of {own.length} batches takes "
            f"{epoch_s * 1e3:.0f} ms{tried}"
        ),
        remedy="persistent_workers=True",
        gain=factor(gain),
        is_measured=factor(gain) is not None,
    )


def full_size_decode(found: Examination) -> Finding | None:
    """Images are decoded whole and shrunk then."""
    shrinking, samples = found.shrinking, found.samples
    if shrinking is None or samples is None or shrinking.ratio < 4 or not loading_matters(found):
        return None
    if (samples.decode_share or 0.0) < 0.2:
        return None
    width, height = shrinking.kept
    is_jpeg = shrinking.format in ("JPEG", "MPO")
    gain, tried = None, ""
    if is_jpeg and shrinking.whole_s and shrinking.reduced_s:
        saved_s = shrinking.whole_s - shrinking.reduced_s
        if saved_s < 0.1 * shrinking.whole_s:
            return None
        gain = samples.median_s / max(samples.median_s / 10, samples.median_s - saved_s)
        tried = (
            f"; one file took {shrinking.whole_s * 1e3:.1f} ms to decode and shrink, "
            f"{shrinking.reduced_s * 1e3:.1f} ms "
            "with a reduced decode"
        )
    remedy = f'image.draft("RGB", ({width}, {height})) right after Image.open, or store the images smaller once'
    return Finding(
        name="full-size-decode",
        cause="Images are decoded at full size and shrunk at once.",
        evidence=(
            f"{shrinking.size[0]}x{shrinking.size[1]} pixels decoded, {width}x{height} kept: "
            f"{shrinking.ratio:.0f} decoded for each one kept, and decoding is "
            f"{samples.decode_share or 0.0:.0%} of a sample's time{tried}"
        ),
        remedy=remedy if is_jpeg else f"store the images at {width}x{height} once (a reduced decode needs JPEG files)",
        gain=gain,
    )


def slow_samples(found: Examination) -> Finding | None:
    """A few samples take most of the time."""
    samples = found.samples
    if samples is None or not samples.slow_indices or not loading_matters(found):
        return None
    share = len(samples.slow_indices) / samples.samples
    if samples.slow_share < 0.25 or share > 0.35:
        return None
    shown = ", ".join(str(index) for index in samples.slow_indices[:8])
    more = ", …" if len(samples.slow_indices) > 8 else ""
    return Finding(
        name="slow-samples",
        cause="A few samples take many times as long as the others, and a whole batch waits for them.",
        evidence=(
            f"{share:.1%} of the samples take {samples.slow_share:.0%} of the time (the median is "
            f"{samples.median_s * 1e3:.2f} ms); slow twice in a row: dataset[{shown}{more}]"
        ),
        remedy=(
            f"look at what dataset[{samples.slow_indices[0]!r}] does, and prepare such samples once; until then "
            "penstock.DataLoader(...), which lets other workers go on meanwhile, or in_order=False"
        ),
    )


def cold_reads(found: Examination) -> Finding | None:
    """What is read is not in the page cache."""
    samples = found.samples
    if samples is None or not loading_matters(found):
        return None
    asked = max(samples.read_nbytes, samples.missed_nbytes)
    by_calls = asked > 0 and samples.missed_nbytes > 0.3 * asked and samples.missed_nbytes > (1 << 20)
    by_faults = samples.major_faults > samples.samples / 2
    if not (by_calls or by_faults) or (samples.storage_share or 0.0) < 0.2:
        return None
    return Finding(
        name="cold-reads",
        cause="What samples read is not in the page cache: it comes from the disk.",
        evidence=(
            f"{size_text(samples.missed_nbytes)} of {size_text(asked)} read came from the disk, {samples.major_faults} "
            f"page faults waited for it; reading is {samples.storage_share or 0.0:.0%} of a sample's time"
        ),
        remedy=(
            "if it is the first epoch only: nothing. Else keep the data set below the free memory (smaller "
            "files), read "
            "large pieces in order rather than small ones at random, and raise num_workers so that reads overlap"
        ),
    )


def python_numbers(found: Examination) -> Finding | None:
    """Samples are lists of Python numbers, which the default collate takes one by one."""
    samples = found.samples
    if samples is None or samples.numbers_per_sample < 32 or not loading_matters(found):
        return None
    share = samples.collate_s / max(1e-9, samples.collate_s + samples.fetch_s)
    if share < 0.3:
        return None
    return Finding(
        name="python-numbers",
        cause="Samples are Python lists of numbers, and collating makes a tensor for each position.",
        evidence=(
            f"{samples.numbers_per_sample} Python numbers in a sample; collating takes "
            f"{samples.collate_s * 1e3:.1f} ms "
            f"per batch, {share:.0%} of what making the batch takes"
        ),
        remedy="return torch.tensor(numbers) (or a NumPy array) from __getitem__ in place of the list",
    )


def no_workers(found: Examination) -> Finding | None:
    """Heavy samples are made in the training process."""
    samples, own = found.samples, found.settings
    if own.num_workers or samples is None or found.machine.usable_cores < 2 or not loading_matters(found):
        return None
    gain = found.gain_of(MORE_WORKERS)
    made_s = samples.fetch_s + samples.collate_s
    refuted = gain is not None and gain.is_clear and gain.median < WORTH
    if made_s < 0.003 or (refuted and not found.machine.is_busy):
        return None
    free = found.trial(FREE)
    step_s = free.batch_s if free is not None and free.batch_s else made_s / 4
    workers = max(2, min(math.ceil(made_s / step_s) + 1, math.floor(found.machine.usable_cores)))
    tried = f"; with 2 workers {gain.median:.1f} times as fast" if gain is not None else ""
    return Finding(
        name="no-workers",
        cause="Samples are made in the training process itself, and the step waits meanwhile.",
        evidence=f"num_workers=0, and a batch takes {made_s * 1e3:.1f} ms to make{tried}",
        remedy=f"num_workers={workers}",
        gain=factor(gain),
        is_measured=factor(gain) is not None,
    )


def workers_cost_more(found: Examination) -> Finding | None:
    """Batches are so cheap that handing them over costs more than making them."""
    samples, own = found.samples, found.settings
    handing_s = handing_of(found)
    if not own.num_workers or samples is None or handing_s is None or not loading_matters(found):
        return None
    made_s = samples.fetch_s + samples.collate_s
    gain = found.gain_of(NO_WORKERS)
    if (
        samples.batch_nbytes > _SMALL_NBYTES
        or made_s > handing_s
        or (gain is not None and gain.is_clear and gain.median < WORTH)
    ):
        return None
    tried = f"; without workers {gain.median:.1f} times as fast" if gain is not None else ""
    return Finding(
        name="workers-cost-more",
        cause="A batch is so cheap that handing it over costs more than making it.",
        evidence=(
            f"making a batch of {samples.batch_samples} takes {made_s * 1e3:.2f} ms in one process, handing it over by "
            f"{own.num_workers} workers takes {handing_s * 1e3:.2f} ms{tried}"
        ),
        remedy="num_workers=0; or a larger batch_size, so that the cost is shared by more samples",
        gain=factor(gain),
        is_measured=factor(gain) is not None,
    )


def workers_do_not_scale(found: Examination) -> Finding | None:
    """Several workers are no faster than one process."""
    samples, own, now = found.samples, found.settings, found.as_it_is
    gain = found.gain_of(MORE_WORKERS)
    if own.num_workers < 2 or samples is None or now is None or now.batch_s is None or gain is None:
        return None
    made_s = samples.fetch_s + samples.collate_s
    handing_s = handing_of(found) or 0.0
    if not loading_matters(found) or own.num_workers > found.machine.usable_cores or handing_s > made_s / 2:
        return None
    if now.batch_s < 0.85 * made_s or not gain.is_clear or gain.median > 1.1:
        return None
    return Finding(
        name="workers-do-not-scale",
        cause="Several workers are no faster than one: they wait for each other, or for one thing that they share.",
        evidence=(
            f"one process makes a batch in {made_s * 1e3:.1f} ms, {own.num_workers} workers together need "
            f"{now.batch_s * 1e3:.1f} ms; {trial_text(found, found.trial(MORE_WORKERS) or now)}"
        ),
        remedy=(
            "look for what workers share: a lock, a server or disk that answers one at a time, one file handle opened "
            "before the workers were forked (open it in the worker, when it is first used)"
        ),
    )


def stream_repeats_itself(found: Examination) -> Finding | None:
    """Every worker of a stream gives the same samples."""
    if not found.repeats_itself:
        return None
    return Finding(
        name="stream-repeats-itself",
        cause="Every worker gives the same samples: the stream is not shared out, and an epoch has each sample often.",
        evidence=f"the first batches of the first two of {found.settings.num_workers} workers were equal",
        remedy=(
            "share it out in __iter__: info = torch.utils.data.get_worker_info(), then "
            "itertools.islice(samples, info.id, None, info.num_workers)"
        ),
    )


def double_precision(found: Examination) -> Finding | None:
    """Batches are float64, and moving them is most of the work."""
    samples = found.samples
    if samples is None or samples.double_share < 0.5 or not loading_matters(found):
        return None
    parts = parts_s(found)
    moved_s = parts.get("collate", 0.0) + parts.get("transport", 0.0)
    if samples.batch_nbytes < (1 << 20) or moved_s < 0.3 * sum(parts.values()):
        return None
    return Finding(
        name="double-precision",
        cause="Batches are float64, twice the bytes of float32, and moving them is a good part of loading.",
        evidence=(
            f"{samples.double_share:.0%} of {size_text(samples.batch_nbytes)} are float64; collating and handing over "
            f"take {moved_s * 1e3:.1f} ms per batch"
        ),
        remedy="return float32 from __getitem__ (array.astype(numpy.float32), tensor.float())",
    )


_CHANGES = {
    MORE_WORKERS: ("too-few-workers", "More workers would load faster."),
    PENSTOCK: ("penstock-pays", "penstock's DataLoader loads the same batches faster."),
    THREADS: ("threads-pay", "Threads in place of processes would load faster."),
    PROCESSES: (
        "threads-hold-the-lock",
        "Samples hold Python's lock; processes make them faster than threads.",
    ),
    NO_WORKERS: ("workers-cost-more", "It is faster without workers."),
    FEWER_WORKERS: ("too-many-workers", "It is faster with fewer workers."),
}


def best_change(found: Examination) -> Finding | None:
    """Of the changes that were tried, the one that gains most."""
    if not loading_matters(found):
        return None
    gains = {name: gain for name in _CHANGES if (gain := found.gain_of(name)) is not None and gain.pays(WORTH)}
    if not gains or (not found.settings.num_workers and set(gains) == {MORE_WORKERS}):
        return None
    best = max(gains, key=lambda name: gains[name].median)
    trial = found.trial(best)
    assert trial is not None
    name, cause = _CHANGES[best]
    parts = parts_s(found)
    handing = f"; handing over takes {parts['transport'] * 1e3:.1f} ms per batch" if "transport" in parts else ""
    return Finding(
        name=name,
        cause=cause,
        evidence=f"{trial_text(found, trial)}{handing if best == PENSTOCK else ''}",
        remedy=trial.line,
        gain=gains[best].median,
        is_measured=True,
    )
