"""Everything the doctor measured of one loop: a frozen snapshot from which all findings are derived.

Seconds are wall clock unless a name says otherwise, sizes are bytes, fractions lie between 0 and 1. A measurement that
could not be made is None, and `Measurements.notes` gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.content_results import EpochOrders, SharedSamples
from penstock.observe.doctor.probe_results import (
    CopyOnWrite,
    HotLine,
    ImageDecode,
    OneLabel,
    OtherLoop,
    SampleCosts,
    WorkerActivity,
    WorkerNoise,
)
from penstock.observe.doctor.step_results import KeptTensors, StepCalls
from penstock.observe.doctor.trial import AS_IS, Gain, Trial, gain_between


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the process may use."""

    cores: int = 1
    """By affinity, without the cgroup's quota."""

    quota_cores: float | None = None
    """The cgroup's CPU quota, in cores; None without one."""

    intra_op_threads: int = 1
    """`torch.get_num_threads()` in the training process."""

    load: float = 0.0
    """Runnable programs over the minute before the measurements began, without this program's workers."""

    others_cores: float | None = None
    """How many of these cores other programs used on average during the measurements; None where unknown."""

    throttled_s: float = 0.0
    """How long the cgroup throttled its processes during the measurements."""

    shm_free_nbytes: int | None = None
    """Free bytes in /dev/shm; None where there is none."""

    shm_nbytes: int | None = None
    """The size of /dev/shm."""

    accelerator: str = ""
    """Its device type, as in "cuda"; empty without one."""

    @property
    def is_busy(self) -> bool:
        """Whether other programs take so much of the processors that a trial with other workers proves little."""
        if self.others_cores is None:
            return self.load >= self.cores
        return self.others_cores >= thresholds.BUSY_FRACTION * self.cores

    @property
    def is_crowded(self) -> bool:
        """Whether it is busy, or was before the measurements, so that torch's threads would wait for each other."""
        return (self.is_busy or self.load >= self.cores) and not self.accelerator

    @property
    def free_fraction(self) -> float:
        """How much of the processors' time was left to this program, where others keep the machine busy; else 1."""
        return max(0.2, 1 - (self.others_cores or 0.0) / self.cores) if self.is_busy else 1.0

    @property
    def usable_cores(self) -> float:
        """How many cores can be kept busy."""
        return min(float(self.cores), self.quota_cores or float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The arguments of the examined loader."""

    dataset: str
    """The class of its dataset; empty without a loader."""

    kind: str = "torch"
    """Whose loader it is: "torch" or "penstock"; empty where the program makes its batches by itself."""

    num_workers: int = 0
    """0 loads in the training process."""

    batch_size: int | None = None
    """None where batches come from a batch_sampler or from the dataset."""

    prefetch_factor: int = 2
    """Batches in flight per worker."""

    persistent_workers: bool = False
    """Whether workers outlive an epoch."""

    pin_memory: bool = False
    """Whether batches are pinned."""

    start_method: str = ""
    """fork, forkserver or spawn; empty without worker processes."""

    length: int | None = None
    """Batches per epoch; None where it is unknown."""

    is_iterable: bool = False
    """Whether the dataset is an IterableDataset."""

    collates_by_default: bool = True
    """Whether batches are made by torch's default_collate."""

    shuffles: bool = False
    """Whether samples are requested in a random order."""

    fetches_in_bulk: bool = False
    """Whether the dataset is asked for all samples of a batch at once, by `__getitems__`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """All measurements of one loop."""

    name: str
    """The name under which the loop is reported."""

    machine: Machine
    """The machine and the container's limits."""

    settings: Settings
    """The loader's arguments."""

    has_step: bool
    """Whether there was a training step; otherwise the loader was measured alone."""

    trials: tuple[Trial, ...] = ()
    """The first is the unchanged loop."""

    samples: SampleCosts | None = None
    """The dataset, measured in this process."""

    transport_s: float | None = None
    """Seconds per batch to transport prebuilt samples to the loop, by the same number of workers; with default_collate,
    to collate them as well."""

    transfer_s: float | None = None
    """Seconds to copy a batch to the accelerator."""

    image_decode: ImageDecode | None = None
    """Images that were decoded at full size and then shrunk."""

    worker_activity: WorkerActivity | None = None
    """The threads of the worker processes."""

    copy_on_write: CopyOnWrite | None = None
    """How a forked worker's private memory grows."""

    worker_noise: WorkerNoise | None = None
    """Whether the random numbers of workers repeat; None where samples are not random."""

    step_calls: StepCalls | None = None
    """Blocking calls inside the step."""

    kept_tensors: tuple[KeptTensors, ...] = ()
    """What the program keeps of every step, the largest first."""

    step_lines: tuple[HotLine, ...] = ()
    """The step's most expensive lines, largest first."""

    called_lines: tuple[HotLine, ...] = ()
    """Those of the sampler, and of what else makes batches in the training process, largest first."""

    stream_repeats: bool = False
    """Whether the workers of an IterableDataset all returned the same first batch."""

    one_label: OneLabel | None = None
    """The label of all samples that were seen first; None where there were several, or none was recognised."""

    shared_samples: tuple[SharedSamples, ...] = ()
    """What the loop's loader and those that evaluate have in common."""

    epoch_orders: EpochOrders | None = None
    """The order of several epochs; None where it changed, or only one was seen."""

    evaluates_later: bool = False
    """Whether the program trains in evaluation mode after its first epoch, and not before."""

    listed_twice: int = 0
    """How many samples the loader has several times by their index."""

    iterators_created: int = 0
    """How often a training function made a new iterator of its loader."""

    loaders_created: int = 1
    """How many loaders like the examined one the training function made, that one included."""

    is_cycled: bool = False
    """Whether a training function takes its batches from an `itertools.cycle` over the loader."""

    other_loops: tuple[OtherLoop, ...] = ()
    """Loops that were not examined and have workers, as far as the program ran them beside the examined one."""

    batches_requested: int = 0
    """How many batches the training function requested from all of these iterators."""

    error: str = ""
    """The exception that ended the loop early, in one line."""

    wall_s: float = 0.0
    """How long everything took."""

    preparing_s: float = 0.0
    """Of that, what the program did before its loop began."""

    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    def trial(self, name: str) -> Trial | None:
        """Return the trial of that name, if it has been timed."""
        return next((one for one in self.trials if one.name == name and one.windows), None)

    @property
    def as_is(self) -> Trial | None:
        """The unchanged loop."""
        return self.trial(AS_IS)

    def gain_of(self, name: str) -> Gain | None:
        """Return how much faster the loop was in that trial than unchanged; None unless both were timed."""
        before, after = self.as_is, self.trial(name)
        return gain_between(before, after) if before and after else None
