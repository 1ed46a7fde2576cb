"""What the doctor measured of one loop: frozen snapshots, from which findings follow by reading alone.

Seconds are wall clock unless a name says otherwise, sizes are bytes, shares lie between 0 and 1. A measurement that
could not be made is None, and `Examination.notes` says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe.trial import AS_IT_IS, Gain, Trial, gain


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the process may use."""

    cores: int = 1
    """By affinity, without the cgroup's quota."""

    quota_cores: float | None = None
    """The cgroup's CPU quota, in cores; None without one."""

    intra_op_threads: int = 1
    """With how many threads torch computes in the training process."""

    load: float = 0.0
    """Programs that wanted a processor when it began, over the minute before; this one's workers not yet among them."""

    throttled_s: float = 0.0
    """How long the cgroup held its processes back during the examination."""

    shm_free_nbytes: int | None = None
    """What is left of /dev/shm; None where there is none."""

    shm_nbytes: int | None = None
    """The size of /dev/shm."""

    accelerator: str = ""
    """Its type, as in "cuda"; empty without one."""

    @property
    def is_busy(self) -> bool:
        """Whether other programs want all processors, so that more workers gain less than they would by themselves."""
        return self.load >= self.cores

    @property
    def usable_cores(self) -> float:
        """How many cores can be kept busy."""
        return min(float(self.cores), self.quota_cores or float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How the loader was made."""

    dataset: str
    """The class of its dataset."""

    kind: str = "torch"
    """Whose loader it is: "torch" or "penstock"."""

    num_workers: int = 0
    """0 loads in the training process."""

    batch_size: int | None = None
    """None where batches come from a batch_sampler or from the dataset."""

    prefetch_factor: int = 2
    """Batches under way for each worker."""

    persistent_workers: bool = False
    """Whether workers live longer than an epoch."""

    pin_memory: bool = False
    """Whether batches are asked to be page-locked."""

    start_method: str = ""
    """fork, forkserver or spawn; empty without worker processes."""

    length: int | None = None
    """Batches of an epoch; None where nobody knows."""

    is_iterable: bool = False
    """Whether the dataset is a stream."""

    collates_by_default: bool = True
    """Whether batches are made by torch's default_collate."""

    shuffles: bool = False
    """Whether samples are asked for in a random order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hotspot:
    """A function that took a good part of the dataset's time."""

    where: str
    """Its name, file and line, as in "augment (train.py:12)"."""

    share: float
    """Of the dataset's time, by itself."""

    caller: str = ""
    """The user's own function that leads to it, where it is not one itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCosts:
    """What samples cost when one process makes them one by one, and collates them."""

    samples: int
    """How many were made."""

    batch_samples: int
    """How many make a batch."""

    sample_s: float
    """Mean seconds of one."""

    median_s: float
    """Median seconds of one."""

    storage_share: float | None = None
    """Reading, and waiting for whatever is read; None where the time could not be told apart."""

    decode_share: float | None = None
    """Decoding and unpacking."""

    transform_share: float | None = None
    """All the rest: transforms, and the dataset's own code."""

    asleep_share: float = 0.0
    """Of the samples' time, in which the thread did not run and did not want to."""

    collate_s: float = 0.0
    """Seconds to collate a batch of them."""

    batch_nbytes: int = 0
    """Tensors and arrays of a batch."""

    double_share: float = 0.0
    """Of the bytes of a batch, those of float64."""

    numbers_per_sample: int = 0
    """Plain Python numbers in one sample."""

    slow_indices: tuple[object, ...] = ()
    """Samples that took more than five times the median, when they were asked for again, too."""

    slow_share: float = 0.0
    """Of the time of all samples, that of those."""

    read_nbytes: int = 0
    """Bytes that system calls read."""

    missed_nbytes: int = 0
    """Bytes that came from the disk, because the page cache did not have them."""

    major_faults: int = 0
    """Page faults that had to read from a disk."""

    hotspots: tuple[Hotspot, ...] = ()
    """Functions, the dearest first."""

    @property
    def fetch_s(self) -> float:
        """Seconds that the samples of a batch take."""
        return self.sample_s * self.batch_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrinking:
    """Images that were decoded whole, and made smaller then."""

    images: int
    """How many."""

    ratio: float
    """The median of decoded pixels for each one that was kept."""

    size: tuple[int, int]
    """A usual size when decoded."""

    kept: tuple[int, int]
    """A usual size afterwards."""

    format: str = ""
    """Of the files, as Pillow says it."""

    whole_s: float | None = None
    """Seconds to decode one whole and shrink it, tried on one of the files."""

    reduced_s: float | None = None
    """Seconds when the decoder reduces it first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threads:
    """Whether threads could make samples side by side."""

    threads: int
    """How many were tried."""

    speedup: float
    """Samples per second of so many threads, over that of one."""

    others_progress: float
    """How far another thread's Python came while a sample was made, of what it does alone."""

    failure: str = ""
    """What went wrong, if it did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLook:
    """What the worker processes did while the loop ran as it is."""

    workers: int
    """How many were looked at."""

    busy_threads: float
    """Threads of one worker that used a processor, the one that makes the samples included."""

    cores: float = 1.0
    """How many processors one worker used while the loop ran."""

    libraries: tuple[str, ...] = ()
    """What they may belong to: openmp, openblas, mkl, opencv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Workers that the loop waited for, and that neither ran nor slept nor read: they waited for a lock or a thread."""

    workers: int
    """How many: all of them."""

    waited_s: float
    """How long the loop had waited for a batch by then."""

    libraries: tuple[str, ...] = ()
    """What that brings threads of its own is loaded there: openmp, openblas, mkl, opencv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """How private memory of a forked worker grew over samples that it had not made before."""

    samples: int
    """How many."""

    nbytes: int
    """By how much it grew."""

    again_nbytes: int
    """By how much it grew over the same samples, asked for again."""

    attribute: str = ""
    """Where many Python objects hang, as in "self.paths"."""

    objects: int = 0
    """How many they are."""

    objects_nbytes: int = 0
    """Their size, about."""

    grew: str = ""
    """An attribute that had more elements afterwards: a cache, in each worker its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pickled:
    """What it takes to send the dataset to one worker."""

    nbytes: int
    """Of the pickle, without tensors, which are shared."""

    seconds: float
    """To make it."""

    largest: str = ""
    """The attribute that most of it is."""

    failure: str = ""
    """Why it cannot be pickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call in the loop's step that holds it up, or does not do what it seems to."""

    what: str
    """As in ".item()"."""

    line: str
    """The line, with its file."""

    per_step: float
    """How often, in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLook:
    """What some steps did, seen from inside."""

    steps: int
    """How many were looked at."""

    reads_back: tuple[Call, ...] = ()
    """Calls that wait for the device, in every step."""

    pageable: tuple[Call, ...] = ()
    """Copies with non_blocking=True from memory that is not pinned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """All of it."""

    name: str
    """What was examined."""

    machine: Machine
    """Where."""

    settings: Settings
    """The loader."""

    has_step: bool
    """Whether there was a step; else the loader was examined alone."""

    trials: tuple[Trial, ...] = ()
    """The first is the loop as it is."""

    samples: SampleCosts | None = None
    """The dataset, in this process."""

    transport_s: float | None = None
    """Seconds per batch when ready-made samples are collated and handed over by as many workers."""

    transfer_s: float | None = None
    """Seconds to copy a batch to the accelerator."""

    shrinking: Shrinking | None = None
    """Images decoded at full size and shrunk."""

    threads: Threads | None = None
    """Whether threads pay."""

    workers: WorkerLook | None = None
    """The worker processes."""

    hang: Hang | None = None
    """Of all workers, when the loop waited for them at the end of its time."""

    growth: Growth | None = None
    """Of a worker's memory."""

    pickled: Pickled | None = None
    """The dataset on its way to a worker."""

    step: StepLook | None = None
    """Inside of the step."""

    repeats_itself: bool = False
    """Whether the workers of a stream all gave the same first batch."""

    beginnings: int = 0
    """How often a training function made a new iterator of its loader, while ..."""

    asked: int = 0
    """... it asked for so many batches."""

    error: str = ""
    """The exception that ended the loop before its examination did, in one line."""

    wall_s: float = 0.0
    """How long it took."""

    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    def trial(self, name: str) -> Trial | None:
        """Return the trial of that name, if it was made."""
        return next((one for one in self.trials if one.name == name and one.stretches), None)

    @property
    def as_it_is(self) -> Trial | None:
        """The loop as it is."""
        return self.trial(AS_IT_IS)

    def gain_of(self, name: str) -> Gain | None:
        """Return how much faster the loop was in that trial, if both were made."""
        before, after = self.as_it_is, self.trial(name)
        return gain(before, after) if before and after else None
