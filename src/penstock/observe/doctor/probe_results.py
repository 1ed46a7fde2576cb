"""What each probe of the doctor returns: frozen data, without any judgement.

Seconds are wall clock unless a name says otherwise, sizes are bytes, fractions lie between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HotLine:
    """A line of the user's that took a good part of the samples' time, or of the steps'."""

    line: str
    """The source line, with its file."""

    fraction: float
    """Of that time, with what the line calls and waits for."""

    turns_fraction: float = 1.0
    """Of the samples or steps that were looked at, those in which the line was seen."""

    calls: str = ""
    """The library function that it calls, as in "gzip.GzipFile.read"; empty where it is the line itself, or C code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedRead:
    """A file or folder that nearly all samples read again."""

    name: str
    """Of the file or folder, without the folders that it lies in."""

    is_folder: bool
    """Whether it is a folder, which is listed."""

    line: str
    """The user's line that opens or lists it, with its file."""

    fraction: float
    """Of the samples' time, that of the lines which read it."""

    samples: int
    """How many samples were seen to read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantSeed:
    """A line of the dataset's that gave a generator of random numbers the same seed for every sample."""

    line: str
    """The line, with its file."""

    seed: int
    """The number."""

    samples: int
    """How many different samples were looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCosts:
    """What samples cost when one process makes them one by one, and collates them."""

    samples: int
    """How many were made."""

    batch_samples: int
    """Samples per batch."""

    sample_s: float
    """Mean seconds per sample."""

    median_s: float
    """Median seconds per sample."""

    sleep_fraction: float = 0.0
    """Of the samples' time, in which the thread neither ran nor was runnable."""

    sampler_s: float = 0.0
    """Processor time to draw the indices of one batch, which the training process does; without an epoch's first."""

    sampler_start_s: float = 0.0
    """Processor time to begin an epoch of the sampler and draw its first index, or the indices of its first batch."""

    collate_s: float = 0.0
    """Seconds to collate one batch."""

    batch_nbytes: int = 0
    """Bytes of the tensors and arrays of a batch."""

    float64_fraction: float = 0.0
    """Of the bytes of a batch, those of type float64."""

    numbers_per_sample: int = 0
    """Plain Python numbers in one sample."""

    slow_indices: tuple[object, ...] = ()
    """Samples that took far longer than the median twice in a row."""

    slow_fraction: float = 0.0
    """Of the time of all samples, that of the slow ones."""

    read_nbytes: int = 0
    """Bytes that system calls read, wherever they came from."""

    disk_nbytes: int = 0
    """Bytes that came from the disk, because the page cache did not have them."""

    major_faults: int = 0
    """Page faults that had to read from a disk."""

    lines: tuple[HotLine, ...] = ()
    """The user's most expensive lines, largest first."""

    repeated_read: RepeatedRead | None = None
    """The file or folder that takes the most time of those that nearly all samples read."""

    constant_seed: ConstantSeed | None = None
    """The first line that seeds a generator with the same number for every sample."""

    not_finite: tuple[object, ...] = ()
    """Samples with a NaN or an infinite value, among the first that were made."""

    @property
    def fetch_s(self) -> float:
        """Seconds to make the samples of one batch."""
        return self.sample_s * self.batch_samples

    @property
    def batch_s(self) -> float:
        """Seconds to make one batch in one process: its samples, and collating them."""
        return self.fetch_s + self.collate_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageDecode:
    """Images that were decoded at full size and then made smaller."""

    images: int
    """How many."""

    pixel_ratio: float
    """Decoded pixels per pixel that was kept: the median over the images."""

    decoded_size: tuple[int, int]
    """Width and height of a typical image when decoded."""

    kept_size: tuple[int, int]
    """Width and height of the same image after it was made smaller."""

    format: str = ""
    """Of the files, as Pillow names it."""

    full_decode_s: float | None = None
    """Seconds to decode one of the files at full size and shrink it."""

    reduced_decode_s: float | None = None
    """Seconds for the same file when the decoder reduces it first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerActivity:
    """What the worker processes did while the loop ran unchanged."""

    workers: int
    """How many were observed."""

    busy_threads: float
    """Mean number of busy threads in one worker, including the one that makes the samples."""

    cores: float = 1.0
    """How many processors the busiest worker used."""

    making_cores: float = 0.0
    """How many the threads that make samples used, of all of them together."""

    runnable_threads: float = 0.0
    """How many threads of the busiest worker used a processor or waited for one at the same time, on average: of those
    that Python's lock lets through one by one, one."""

    asleep_fraction: float = 0.0
    """Of its time, in which the thread that makes samples neither ran nor was runnable: of the worker that slept
    least."""

    libraries: tuple[str, ...] = ()
    """Libraries with threads of their own that are loaded in a worker: openmp, openblas, mkl, opencv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNoise:
    """How the random numbers repeat of a dataset whose samples are random."""

    same_in_workers: bool
    """Whether two workers drew the same."""

    same_in_epochs: bool
    """Whether the workers of the next epoch drew the same."""

    has_init_fn: bool = False
    """Whether the loader has a `worker_init_fn`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneLabel:
    """The first batches that a loop was given had one label each."""

    samples: int
    """How many."""

    label: float
    """Theirs, of the first of their batches; True and False are 1 and 0."""

    labels: int = 1
    """How many different ones they have: each batch has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyOnWrite:
    """How the private memory of a forked worker grew over samples that it had not made before."""

    samples: int
    """How many."""

    nbytes: int
    """By how much the memory grew."""

    repeat_nbytes: int
    """By how much it grew over the same samples, made once more."""

    attribute: str = ""
    """The attribute that holds the most Python objects, as in "self.paths"."""

    objects: int = 0
    """How many it holds."""

    objects_nbytes: int = 0
    """Their estimated size."""

    growing_attribute: str = ""
    """An attribute that had more elements afterwards, such as a cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherLoop:
    """A loop of the program that was not examined, such as a validation, whose loader has workers."""

    dataset: str
    """The class of its dataset."""

    num_workers: int
    """Of its loader."""

    starts: int
    """How often its workers were started."""

    loaders: int
    """How many loaders were made for it."""

    startup_s: float
    """From the start of a pass to its first batch: the median."""

    batches_between: float = 0.0
    """How many batches of the examined loop there are for each start, where it starts after every epoch; else 0."""
