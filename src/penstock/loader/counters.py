"""What one loader counts over its life; `snapshot` makes the frozen `LoaderStatistics` of it."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.events import Recorder
from penstock.core.stats import LoaderStatistics, RingCounts, StageTimes
from penstock.loader.sampling.index_digest import DigestLog

_KEPT_INDICES = 1000


@dataclass(slots=True)
class Counters:
    """Mutable counters; times in nanoseconds. Written by the iterating thread only."""

    epochs: int = 0
    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    first_batch_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    asleep_ns: int = 0
    inline_ns: int = 0
    transport_ns: int = 0
    workers_ns: int = 0
    wait_ns: int = 0
    step_ns: int = 0
    dispatch: str = ""
    dispatch_reason: str = ""
    inline_batches: int = 0
    restarts: int = 0
    retried: int = 0
    quarantined: list[Any] = field(default_factory=list)
    skipped: int = 0
    skipped_indices: list[Any] = field(default_factory=list)
    length: int | None = None
    uploads: int = 0
    copy_waits: int = 0
    """How often the device's wait for a copy was timed."""
    copy_wait_ns: int = 0
    """In all of these."""
    uploading_nbytes: int = 0
    pinning: str = ""
    digests: DigestLog | None = None
    """Of the indices handed out, by penstock's iterator."""
    share: tuple[int, int] | None = None
    """This rank's share of the samples, if known."""
    recorder: Recorder | None = None
    """Where events go, if somebody asked for a trace."""
    workers: int | None = None
    """How many there are now, where the number changes."""
    workers_reason: str = ""
    begun_ns: int = 0
    """When the first iterator was made; 0 for a loader that nobody has iterated."""
    fallback_reason: str = ""
    """Why torch's iterator ran in place of penstock's; empty if it did not."""
    loop: weakref.ref[Any] | None = None
    """The iterator that was made last, for observers in other threads (see `observe.live.loop_snapshot`)."""

    @contextlib.contextmanager
    def changing_workers(self) -> Iterator[None]:
        """Count what the `with` block takes as starting and stopping workers."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self.workers_ns += time.perf_counter_ns() - began

    def skip(self, skipped: Sequence[tuple[Any, str]]) -> None:
        """Count samples that were left out or replaced."""
        self.skipped += len(skipped)
        left = _KEPT_INDICES - len(self.skipped_indices)
        self.skipped_indices.extend(index for index, _ in skipped[:left])

    def snapshot(
        self, *, ring: RingCounts, worker_type: str, start_method: str, workers: int, digests: bool = True
    ) -> LoaderStatistics:
        """Return the counters as they are now; without `digests`, those that need not be computed first."""
        log = self.digests if digests else None
        no_digest = "an iterator that is not penstock's ran this loader" if self.begun_ns else ""
        return LoaderStatistics(
            epochs=self.epochs,
            batches=self.batches,
            samples=self.samples,
            nbytes=self.nbytes,
            first_batch_s=self.first_batch_ns / 1e9,
            stages=StageTimes(
                fetch_s=self.fetch_ns / 1e9,
                collate_s=self.collate_ns / 1e9,
                asleep_s=self.asleep_ns / 1e9,
                transport_s=self.transport_ns / 1e9,
                workers_s=self.workers_ns / 1e9,
                wait_s=self.wait_ns / 1e9,
                step_s=self.step_ns / 1e9,
            ),
            worker_type=worker_type,
            start_method=start_method,
            workers=workers if self.workers is None else self.workers,
            workers_reason=self.workers_reason,
            fallback_reason=self.fallback_reason,
            dispatch=self.dispatch,
            dispatch_reason=self.dispatch_reason,
            inline_batches=self.inline_batches,
            restarts=self.restarts,
            retried=self.retried,
            quarantined=tuple(self.quarantined),
            skipped=self.skipped,
            skipped_indices=tuple(self.skipped_indices),
            ring=ring,
            length=self.length,
            uploads=self.uploads,
            copy_wait_s=self.copy_wait_ns / self.copy_waits / 1e9 if self.copy_waits else None,
            uploading_nbytes=self.uploading_nbytes,
            pinning=self.pinning,
            index_digests=log.digests() if log is not None else (),
            index_digest_reason=self.digests.reason if self.digests is not None else no_digest,
            share=self.share,
        )
