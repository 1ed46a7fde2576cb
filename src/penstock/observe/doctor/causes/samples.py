"""Causes that lie in the samples: how they are read, decoded and typed."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import OF_SAMPLES, gain_without, loading_matters, loading_parts_s
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import SampleCosts
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding

_SHOWN_INDICES = 8


@cause("full-size-decode", "image_decode", "samples")
def full_size_decode(measured: Measurements) -> Finding | None:
    """Images are decoded at full size and then made smaller."""
    images, samples = required(measured.image_decode), required(measured.samples)
    decode_fraction = (images.full_decode_s or 0.0) / max(1e-9, samples.median_s)
    if images.pixel_ratio < THRESHOLDS.shrunk_pixel_ratio or not loading_matters(measured):
        return None
    if decode_fraction < THRESHOLDS.part_fraction and images.full_decode_s is not None:
        return None
    width, height = images.kept_size
    is_jpeg = images.format in ("JPEG", "MPO")
    gain, tried = None, ""
    if is_jpeg and images.full_decode_s and images.reduced_decode_s:
        saved_s = images.full_decode_s - images.reduced_decode_s
        if saved_s < THRESHOLDS.reduced_decode_saving * images.full_decode_s:
            return None
        gain = gain_without(min(1.0, saved_s / samples.median_s), measured)
        tried = (
            f"; one file took {images.full_decode_s * 1e3:.1f} ms to decode and shrink, "
            f"{images.reduced_decode_s * 1e3:.1f} ms with a reduced decode"
        )
    remedy = f'image.draft("RGB", ({width}, {height})) right after Image.open, or store the images smaller once'
    return Finding(
        name="full-size-decode",
        cause="Images are decoded at full size and made smaller right after that.",
        evidence=(
            f"{images.decoded_size[0]}x{images.decoded_size[1]} pixels decoded, {width}x{height} kept: "
            f"{images.pixel_ratio:.0f} decoded for each one kept; a sample takes {samples.median_s * 1e3:.1f} ms{tried}"
        ),
        remedy=remedy if is_jpeg else f"store the images at {width}x{height} once (a reduced decode needs JPEG files)",
        gain=gain,
    )


@cause("slow-samples", "samples")
def slow_samples(measured: Measurements) -> Finding | None:
    """A few samples take most of the time."""
    samples = required(measured.samples)
    if not samples.slow_indices or not loading_matters(measured):
        return None
    fraction = len(samples.slow_indices) / samples.samples
    if samples.slow_fraction < THRESHOLDS.slow_time_fraction or fraction > THRESHOLDS.slow_sample_fraction:
        return None
    shown = ", ".join(str(index) for index in samples.slow_indices[:_SHOWN_INDICES])
    more = ", …" if len(samples.slow_indices) > _SHOWN_INDICES else ""
    return Finding(
        name="slow-samples",
        cause="A few samples take many times as long as the others, and their whole batch waits for them.",
        evidence=(
            f"{fraction:.1%} of the samples take {samples.slow_fraction:.0%} of the time (the median is "
            f"{samples.median_s * 1e3:.2f} ms); slow twice in a row: dataset[{shown}{more}]"
        ),
        remedy=(
            f"profile dataset[{samples.slow_indices[0]!r}], and prepare such samples once before training; until then "
            "penstock.DataLoader(...), which lets other workers continue meanwhile, or in_order=False"
        ),
    )


@cause("cold-reads", "samples")
def cold_reads(measured: Measurements) -> Finding | None:
    """What samples read is not in the page cache."""
    samples = required(measured.samples)
    if not loading_matters(measured):
        return None
    read_nbytes = max(samples.read_nbytes, samples.disk_nbytes)
    by_calls = read_nbytes > 0 and samples.disk_nbytes > max(
        THRESHOLDS.disk_fraction * read_nbytes, THRESHOLDS.disk_nbytes
    )
    by_faults = samples.major_faults > THRESHOLDS.major_faults_per_sample * samples.samples
    if not (by_calls or by_faults) or samples.sleep_fraction < THRESHOLDS.part_fraction:
        return None
    return Finding(
        name="cold-reads",
        cause="The data that samples read is not in the page cache, so it comes from the disk.",
        evidence=(
            f"{size_text(samples.disk_nbytes)} of {size_text(read_nbytes)} read came from the disk, "
            f"{samples.major_faults} page faults waited for it; a sample waits {samples.sleep_fraction:.0%} of its time"
        ),
        remedy=(
            "nothing, if this is the first epoch only. Otherwise keep the data set below the free memory (smaller "
            "files), read large blocks in order instead of small ones at random, and raise num_workers so that reads "
            "overlap"
        ),
    )


@cause("python-numbers", "samples")
def python_numbers(measured: Measurements) -> Finding | None:
    """Samples are lists of Python numbers, which default_collate handles one by one, and pickle as well."""
    samples, parts = required(measured.samples), loading_parts_s(measured)
    if samples.numbers_per_sample < THRESHOLDS.python_numbers or not loading_matters(measured):
        return None
    if not measured.settings.collates_by_default:
        return _pickled_numbers(samples, parts.get("transport", 0.0), sum(parts.values()))
    fraction = samples.collate_s / max(1e-9, samples.batch_s)
    if fraction < THRESHOLDS.moving_fraction:
        return None
    return Finding(
        name="python-numbers",
        cause="Samples are Python lists of numbers, and collating them makes one tensor for each position.",
        evidence=(
            f"{samples.numbers_per_sample} Python numbers in a sample; collating takes {samples.collate_s * 1e3:.1f} "
            f"ms per batch, {fraction:.0%} of the time to make the batch"
        ),
        remedy="return torch.tensor(numbers) (or a NumPy array) from __getitem__ instead of the list",
    )


def _pickled_numbers(samples: SampleCosts, transport_s: float, loading_s: float) -> Finding | None:
    if transport_s < THRESHOLDS.most_fraction * loading_s:
        return None
    return Finding(
        name="python-numbers",
        cause="Batches hold many Python objects: a worker pickles them one by one, and the loop makes them anew.",
        evidence=(
            f"{samples.numbers_per_sample} Python numbers in a sample; transport takes {transport_s * 1e3:.1f} ms of "
            f"{loading_s * 1e3:.1f} ms of loading per batch"
        ),
        remedy="return only what the step uses, in tensors: torch.tensor(numbers) (or a NumPy array) in __getitem__",
    )


@cause("made-one-by-one", "samples")
def made_one_by_one(measured: Measurements) -> Finding | None:
    """Large batches are made of cheap samples, each by calls of its own.

    Source: the documentation of `torch.utils.data`, on disabling automatic batching, and `Dataset.__getitems__`.
    """
    samples, own, parts = required(measured.samples), measured.settings, loading_parts_s(measured)
    if own.fetches_in_bulk or own.batch_size is None or not loading_matters(measured):
        return None
    if samples.sample_s >= THRESHOLDS.costly_sample_s or samples.batch_s < THRESHOLDS.one_by_one_s:
        return None
    own_s = sum(parts.get(part, 0.0) for part in (*OF_SAMPLES, "collate"))
    if own_s < THRESHOLDS.most_fraction * sum(parts.values()):
        return None
    return Finding(
        name="made-one-by-one",
        cause="A batch is made of many cheap samples, one by one: most of its time is Python's calls for each.",
        evidence=(
            f"a batch has {samples.batch_samples} samples of {samples.sample_s * 1e6:.1f} µs each; they and collating "
            f"them take {samples.batch_s * 1e3:.1f} ms of a process's time, for "
            f"{size_text(samples.batch_nbytes)}"
        ),
        remedy=f"make a whole batch at once: {bulk(measured)}",
        gain=gain_without(1.0, measured, (*OF_SAMPLES, "collate")),
    )


def bulk(measured: Measurements) -> str:
    """Return how a loader gets a whole batch from its dataset at once."""
    if measured.settings.is_iterable:
        return "an IterableDataset can yield batches, made with NumPy or torch: DataLoader(..., batch_size=None)"
    return (
        "index the data with all indices of a batch: DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), "
        "batch_size, drop_last=False), batch_size=None); or by __getitems__(indices), which a DataLoader asks for all "
        "samples of a batch: list(zip(self.x[indices], self.y[indices]))"
    )


@cause("float64-samples", "samples")
def float64_samples(measured: Measurements) -> Finding | None:
    """Samples are float64, and moving them is a large part of loading, or nothing is computed in it."""
    samples, step = required(measured.samples), measured.step_calls
    sample_nbytes = samples.batch_nbytes / max(1, samples.batch_samples)
    if samples.float64_fraction < THRESHOLDS.float64_fraction or sample_nbytes < THRESHOLDS.double_sample_nbytes:
        return None
    if samples.numbers_per_sample >= THRESHOLDS.python_numbers:  # of Python's numbers, which is what is to be changed
        return None
    parts = loading_parts_s(measured)
    moving_s = parts.get("collate", 0.0) + parts.get("transport", 0.0)
    is_large = samples.batch_nbytes >= THRESHOLDS.large_batch_nbytes and loading_matters(measured)
    if is_large and moving_s >= THRESHOLDS.moving_fraction * sum(parts.values()):
        casts, why = "", f"collate and transport take {moving_s * 1e3:.1f} ms per batch"
    elif step is None or step.computes_in_double:
        return None
    else:
        moving_s = 0.0
        casts = "; ".join(f"{call.what} in {call.line}" for call in step.double_casts)
        why = f"every step converts them: {casts}" if casts else "no product of the step is in float64"
    return Finding(
        name="float64-samples",
        cause="Samples are float64, NumPy's default and twice the bytes of float32.",
        evidence=f"{samples.float64_fraction:.0%} of the {size_text(samples.batch_nbytes)} of a batch; {why}",
        remedy="return float32 from __getitem__ (array.astype(numpy.float32), tensor.float())",
        is_uncertain=not (casts or moving_s),
    )
