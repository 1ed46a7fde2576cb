"""Causes that lie in the samples: how they are read, decoded and typed."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import OF_SAMPLES, gain_without, loading_matters, loading_parts_s
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import SampleCosts
from penstock.observe.record.finding import Finding

_SHRUNK_PIXEL_RATIO = 4.0
"""Pixels decoded per pixel kept: a JPEG decoder halves width and height at least: 2 x 2 pixels."""
_REDUCED_DECODE_SAVING = 0.1
"""Of the full decode: a reduced decode that saves less is within the noise of timing one file."""
_SLOW_SAMPLE_FRACTION = 0.35
"""Of the samples: with more than this they are not exceptions, and the median says little."""
_DISK_FRACTION = 0.3
"""Of the bytes read: with less, the page cache serves most reads."""
_DISK_NBYTES = 1 << 20
"""Bytes: importing a module during the measurement reads less than this."""
_MAJOR_FAULTS_PER_SAMPLE = 0.5
"""Faults per sample: memory-mapped data that is not in the page cache faults once per sample or more."""
_FLOAT64_FRACTION = 0.5
"""Of a batch's bytes: with less, halving them saves under a quarter."""
_DOUBLE_SAMPLE_NBYTES = 512
"""Bytes of a sample: a target of a few numbers costs nothing in any type."""
_LARGE_BATCH_NBYTES = 1 << 20
"""Bytes: moving a smaller batch costs messages, and not bytes: a smaller type does not help."""
_MOVING_FRACTION = 0.3
"""Of loading: collate and transport have to take this much before a smaller type pays."""
_ONE_BY_ONE_S = 0.006
"""Seconds per batch: cheap samples whose batch takes less gain as much from fewer workers, or larger batches."""

_SHOWN_INDICES = 8


@cause("full-size-decode", "image_decode", "samples")
def full_size_decode(measured: Measurements) -> Finding | None:
    """Images are decoded at full size and then made smaller."""
    images, samples = required(measured.image_decode), required(measured.samples)
    decode_fraction = (images.full_decode_s or 0.0) / max(1e-9, samples.median_s)
    if images.pixel_ratio < _SHRUNK_PIXEL_RATIO or not loading_matters(measured):
        return None
    if decode_fraction < thresholds.PART_FRACTION and images.full_decode_s is not None:
        return None
    width, height = images.kept_size
    is_jpeg = images.format in ("JPEG", "MPO")
    gain, tried = None, ""
    if is_jpeg and images.full_decode_s and images.reduced_decode_s:
        saved_s = images.full_decode_s - images.reduced_decode_s
        if saved_s < _REDUCED_DECODE_SAVING * images.full_decode_s:
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
    if samples.slow_fraction < thresholds.SLOW_TIME_FRACTION or fraction > _SLOW_SAMPLE_FRACTION:
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
    by_calls = read_nbytes > 0 and samples.disk_nbytes > max(_DISK_FRACTION * read_nbytes, _DISK_NBYTES)
    by_faults = samples.major_faults > _MAJOR_FAULTS_PER_SAMPLE * samples.samples
    if not (by_calls or by_faults) or samples.sleep_fraction < thresholds.PART_FRACTION:
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
    if samples.numbers_per_sample < thresholds.PYTHON_NUMBERS or not loading_matters(measured):
        return None
    if not measured.settings.collates_by_default:
        return _pickled_numbers(samples, parts.get("transport", 0.0), sum(parts.values()))
    fraction = samples.collate_s / max(1e-9, samples.batch_s)
    if fraction < _MOVING_FRACTION:
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
    if transport_s < thresholds.MOST_FRACTION * loading_s:
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
    if samples.sample_s >= thresholds.COSTLY_SAMPLE_S or samples.batch_s < _ONE_BY_ONE_S:
        return None
    own_s = sum(parts.get(part, 0.0) for part in (*OF_SAMPLES, "collate"))
    if own_s < thresholds.MOST_FRACTION * sum(parts.values()):
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
    if samples.float64_fraction < _FLOAT64_FRACTION or sample_nbytes < _DOUBLE_SAMPLE_NBYTES:
        return None
    if samples.numbers_per_sample >= thresholds.PYTHON_NUMBERS:  # of Python's numbers, which is what is to be changed
        return None
    parts = loading_parts_s(measured)
    moving_s = parts.get("collate", 0.0) + parts.get("transport", 0.0)
    is_large = samples.batch_nbytes >= _LARGE_BATCH_NBYTES and loading_matters(measured)
    if is_large and moving_s >= _MOVING_FRACTION * sum(parts.values()):
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
