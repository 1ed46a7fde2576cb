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

    wait_s: float = 0.0
    """In the main process: blocked because the next batch was not ready (the stall)."""

    step_s: float = 0.0
    """Between returning one batch and the request for the next: the user's own step."""


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

    stall_fraction: float = 0.0
    """wait_s over (wait_s + step_s + transport_s + in-process loading), between 0 and 1; with the first batch."""

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

    split_batches: int = 0
    """Batches that several workers filled together."""

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

    uploads_hidden: int = 0
    """Those whose copy was done when they were requested."""

    uploading_nbytes: int = 0
    """Device memory of batches copied ahead and not yet returned."""

    pinning: str = ""
    """What is page-locked and why, as text; empty without pinning."""

    prefetch: str = ""
    """How many batches are copied ahead to the device, and the measurement behind it, as text."""
