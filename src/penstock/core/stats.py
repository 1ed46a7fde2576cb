"""The statistics of a loader, as frozen snapshots (`loader.statistics()`).

All times are seconds of wall clock (`time.perf_counter_ns`), all sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds spent in each stage, summed over all batches returned.

    `fetch` and `collate` are summed over workers, so with several workers they may exceed the wall clock.
    """

    fetch_s: float = 0.0
    """Inside the dataset: read, decode, transform (in the workers; in the main process without workers)."""

    collate_s: float = 0.0
    """Turning samples into one batch, the copy into the slot included (in the workers, as above)."""

    transport_s: float = 0.0
    """In the main process: dispatching tasks, receiving envelopes, rebuilding the batch's tensors."""

    workers_s: float = 0.0
    """In the main process: starting and stopping workers between an epoch's beginning and its end."""

    wait_s: float = 0.0
    """In the main process: blocked because the next batch was not ready (the stall)."""

    asleep_s: float = 0.0
    """Of fetch and collate: waiting for a disk, a network or a lock, rather than computing or waiting for a core."""

    step_s: float = 0.0
    """Between returning one batch and the request for the next: the user's own step, loops over other loaders in it
    included, which count their time as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingCounts:
    """The states of the slots of a loader's ring, and what the ring did to stay within its budget."""

    free: int = 0
    """Slots without a batch."""

    filling: int = 0
    """Slots that workers write to."""

    ready: int = 0
    """Slots whose batch waits to be returned."""

    held: int = 0
    """Slots whose batch the user still refers to."""

    copying: int = 0
    """Pinned slots without a view, which copies started by the user may still read."""

    segments: int = 0
    """Shared segments that the slots are cut from."""

    nbytes: int = 0
    """Bytes of those segments that have been written at least once."""

    pinned_nbytes: int = 0
    """Bytes of those segments that are page-locked for a device."""

    budget_nbytes: int = 0
    """The ring never lets `nbytes` grow past this."""

    grown: int = 0
    """Times that slots were added after the first."""

    copied_out: int = 0
    """Batches copied to private memory because the ring was full of held batches."""

    oversize: int = 0
    """Batches that outgrew their slot and came in a separate segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexDigest:
    """The digest of the indices that a loop has been handed in one pass, up to some batch.

    The same indices in the same order have the same digest, in any process and on any machine, whatever the number and
    type of workers, in all versions of penstock with the same version of states. The order is that in which the sampler
    draws, also with `in_order=False`. Ranks that share out samples have different ones. Indices of samples that
    `errors=` has left out count. A stream has no indices, and so no digest.
    """

    epoch: int
    """Of the pass, from 0."""

    batches: int
    """Handed out in this epoch, those before a resume included."""

    digest: str
    """64 bits, as 16 hexadecimal digits; see `penstock.loader.sampling.index_digest` for the formula."""

    start: int = 0
    """Where it begins: 0, or, after a resume from another rank's state or another number of ranks, how many indices of
    the epoch's order (of all ranks) came before."""

    is_end: bool = False
    """Whether the pass ended here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStatistics:
    """A snapshot of one DataLoader, over all its epochs so far."""

    epochs: int = 0
    """Epochs that ran to their end."""

    batches: int = 0
    """Batches returned."""

    samples: int = 0
    """Samples in those batches."""

    nbytes: int = 0
    """Bytes of tensors and arrays in those batches."""

    first_batch_s: float = 0.0
    """From `iter(loader)` to the first batch, of the latest epoch."""

    stages: StageTimes = field(default_factory=StageTimes)
    """Seconds by stage."""

    worker_type: str = "inline"
    """What runs the dataset: inline, thread, or process."""

    start_method: str = ""
    """fork, forkserver or spawn for process workers, else empty."""

    workers: int = 0
    """Workers asked for; with num_workers="auto" as many as there are now, or were at the epoch's end."""

    workers_reason: str = ""
    """With num_workers="auto", the reason for their number."""

    fallback_reason: str = ""
    """Why torch's own iterator runs this loader; empty where penstock's does."""

    dispatch: str = ""
    """How tasks are dispatched: 'demand' or 'round_robin', or 'stream' (iterable datasets)."""

    dispatch_reason: str = ""
    """The reason for it, as text."""

    inline_batches: int = 0
    """Batches so small that they travelled in the envelope, without a slot."""

    restarts: int = 0
    """Worker processes started to replace ones that died."""

    retried: int = 0
    """Tasks dispatched again after a worker died."""

    quarantined: tuple[object, ...] = ()
    """Indices of samples that killed their worker `max_worker_crashes` times."""

    skipped: int = 0
    """Samples left out or replaced under errors="skip" or a callable."""

    skipped_indices: tuple[object, ...] = ()
    """The first thousand of them (for iterable datasets, the position within the worker's stream)."""

    ring: RingCounts = field(default_factory=RingCounts)
    """The ring's slots."""

    length: int | None = None
    """Batches per epoch, if the sampler knows (for iterable datasets: once `len(loader)` was called)."""

    uploads: int = 0
    """Batches copied to a device (`device=`)."""

    copy_wait_s: float | None = None
    """Seconds that the device waited for a batch's copy, the mean of the steps that were timed, one in 64. None before
    the first of them, and where copies cannot be timed."""

    uploading_nbytes: int = 0
    """Device memory of batches copied ahead and not yet returned."""

    pinning: str = ""
    """What is page-locked and why, as text; empty without pinning."""

    index_digests: tuple[IndexDigest, ...] = ()
    """Digests of the indices handed out: after 1, 2, 4, 8, ... batches, at the end of each pass, and now. 128 at most:
    those within earlier passes are dropped first, and then the earliest passes."""

    index_digest_reason: str = ""
    """Why the pass begun last has no digest, as text; empty if it has one."""

    share: tuple[int, int] | None = None
    """Which share of the samples this rank is handed, and of how many; (0, 1) is all of them. Ranks with the same share
    of several get the same indices, and others get others. None where the sampler or dataset decides it by itself."""

    @property
    def loading_s(self) -> float:
        """Seconds that loops over the loader waited for data: for a batch that was not ready, for its transport, for
        workers that start or stop and, without workers, for the dataset and the collate function, which then run in the
        loop.
        """
        stages = self.stages
        inline_s = stages.fetch_s + stages.collate_s if self.worker_type == "inline" else 0.0
        return stages.wait_s + stages.transport_s + stages.workers_s + inline_s

    @property
    def loop_s(self) -> float:
        """Seconds spent in loops over the loader: waiting for data, and the steps."""
        return self.loading_s + self.stages.step_s

    @property
    def stall_fraction(self) -> float:
        """The share of the loops' time that the step waited for data, between 0 and 1; the rest is the step's."""
        return self.loading_s / self.loop_s if self.loop_s > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of loop; 0 before the first batch."""
        return self.samples / self.loop_s if self.loop_s > 0 else 0.0
