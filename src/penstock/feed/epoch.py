"""One pass over the data with workers: the window of batches under way, their order, and what to do about deaths.

A batch's life here: `_give_out` (a slot, and one piece or several) → reports → `_settle` (ready, in its place) →
`_hand_out` (decoded into views that hold the slot). All of it happens in the thread that calls `next`.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.core.errors import WorkerError, WorkerTimeoutError
from penstock.core.events import Recorder
from penstock.feed.auto import Regulator
from penstock.feed.batch import Batch
from penstock.feed.counters import Counters
from penstock.feed.crew import Crew
from penstock.feed.deaths import Deaths
from penstock.feed.dispatch import Dispatch
from penstock.feed.stream_cursor import Used
from penstock.feed.transport.ring import Ring
from penstock.feed.workers.base import Death, Piece, Pool, Report
from penstock.feed.workers.lanes import Lane
from penstock.feed.workers.maker import Job, Part


class EpochRunner:
    """Runs epochs on one pool; the loader's iterator asks it for batch after batch."""

    def __init__(
        self,
        *,
        job: Job,
        pool: Pool,
        ring: Ring,
        dispatch: Dispatch,
        counters: Counters,
        in_order: bool,
        timeout_s: float,
        max_deaths: int,
        spare_slots: int = 1,
        snapshot_every: int = 1,
        regulator: Regulator | None = None,
    ) -> None:
        self._job = job
        self._ring = ring
        self._dispatch = dispatch
        self._counters = counters
        self._in_order = in_order
        self._timeout_s = timeout_s or None
        self._spare_slots = spare_slots
        self._snapshot_every = snapshot_every
        self._seq = 0
        self._deaths = Deaths(job, max_deaths)
        self._batches: dict[int, Batch] = {}
        self.pool = pool
        self.crew = Crew(job=job, pool=pool, ring=ring, dispatch=dispatch, counters=counters, regulator=regulator)
        # Also when the program ends with the iterator alive; and without a reference back to this object.
        self.close = weakref.finalize(self, _close, pool, ring)
        ring.announce = pool.announce

    def start(self, lanes: Sequence[Lane] = ()) -> None:
        """Start the workers; for an iterable dataset, with its lanes."""
        try:
            self.pool.start(lanes)
        except BaseException:
            self.close()
            raise
        self._ring.announce_all(self.pool.announce)

    def begin(self, indices: Iterator[Any], epoch_seed: int, lanes: Sequence[Lane] = (), turn: int = 0) -> None:
        """Begin an epoch over what `indices` yields; what is left of an earlier one is abandoned.

        Args:
            indices: of each batch.
            epoch_seed: what the randomness of samples depends on.
            lanes: of an iterable dataset; the first epoch's are those of `start`.
            turn: the lane whose batch comes first.
        """
        self._lanes = [*lanes]
        if self._batches or self._seq:
            self._abandon()
        self._indices = indices
        self._epoch_seed = epoch_seed
        self.unused: list[Used] = []
        """What had nothing to hand out since the last batch that was."""
        self.receipt: Sequence[Used] = ()
        self._exhausted = self._job.iterable and all(lane.has_ended for lane in self._lanes)
        self._next_number = 0
        self._next_out = 0
        self._ready: deque[Batch] = deque()
        self._under_way = 0
        self._lane_batches = [0] * len(self._lanes)
        self._dispatch.begin_epoch([not lane.has_ended for lane in self._lanes], turn)
        self.crew.begin_epoch()
        self._send_more()

    def _abandon(self) -> None:
        untaken = self.pool.cancel(self._lanes)
        for batch in self._batches.values():
            batch.cancelled = True
            if batch.left == 0:
                batch.drop(self._ring)
        self._batches.clear()
        for batch in self._ready:
            batch.drop(self._ring)
        for piece in (*untaken, *self.crew.pieces):
            self._retire_cancelled(piece)
        self.crew.pieces.clear()

    # ── handing out ─────────────────────────────────────────────────────────────────────────────────────────

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
            WorkerTimeoutError, WorkerKilledError, or what the dataset or collate function raised.
        """
        while True:
            batch = self._pop_ready()
            if batch is not None:
                self._note(batch)
                self._send_more()
                return self._hand_out(batch)
            self._send_more()
            if not self._under_way and self._exhausted:
                raise StopIteration
            self._wait()

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if it is there without waiting; raises as `next_batch` does."""
        self._act_on(self.pool.collect(0.0))
        batch = self._pop_ready()
        if batch is None:
            if not self._under_way and self._exhausted:
                raise StopIteration
            return None
        self._note(batch)
        self._send_more()
        return (self._hand_out(batch),)

    def _note(self, batch: Batch) -> None:
        self.crew.handed_out(batch.number, batch.work_ns, self._next_number)

    def _pop_ready(self) -> Batch | None:
        if not self._in_order:
            if not self._ready:
                return None
            self._under_way -= 1
            self.unused.append(self._ready[0].used)
            return self._ready.popleft()
        while (batch := self._batches.get(self._next_out)) is not None and batch.left == 0:
            del self._batches[self._next_out]
            self._next_out += 1
            self._under_way -= 1
            self.unused.append(batch.used)
            if not batch.void:
                return batch
        return None

    def _hand_out(self, batch: Batch) -> Any:
        batch.raise_error(self._ring)
        self.receipt, self.unused = self.unused, []
        return batch.open(self._ring, self._counters)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────

    def _send_more(self) -> None:
        dispatch = self._dispatch
        while not self._exhausted:
            window = 1 if self.crew.is_absent else dispatch.window()
            if self._under_way >= window or (dispatch.mode == "probing" and not self._may_probe()):
                return
            # Beside the window, slots for what the user looks at; more only when the user keeps them all.
            slot = self._ring.acquire(window + self._spare_slots, grow=self._under_way == 0)
            if slot is None and self._under_way:
                return
            worker = None
            if dispatch.mode in ("round_robin", "stream"):
                worker = dispatch.next_taker(in_order=self._in_order, most=window)
                if worker is None:
                    self._exhausted = not any(dispatch.active)
                    if slot is not None:
                        self._ring.release(slot)
                    return
            batch = Batch(self._next_number, None, slot, worker)
            try:
                batch.indices = next(self._indices)
            except StopIteration:
                self._exhausted = True
                batch.drop(self._ring)
                return
            except Exception as error:
                # Raised where it belongs: after the batches that were sampled before it.
                self._exhausted = True
                batch.error = error
            self._next_number += 1
            self._batches[batch.number] = batch
            self._under_way += 1
            if batch.error is not None:
                self._settle(batch)
                return
            if worker is not None:
                dispatch.load[worker] += 1
            self._give_out(batch)

    def _may_probe(self) -> bool:
        """While probing: one batch that all workers fill together, or else one batch for each worker."""
        if self._next_number == 0:
            return True
        first = self._batches.get(0)
        return first is not None and not first.stops and self._next_number < self.pool.present()

    def _give_out(self, batch: Batch) -> None:
        rows = len(batch.indices) if self._job.auto_collation else 1
        can_be_split = self._job.rows_can_be_split and batch.slot is not None and not self.crew.is_absent
        parts = self._dispatch.parts(rows) if can_be_split else 1
        if parts == 1:
            if self._dispatch.mode == "probing":
                self._assign(batch)
            self._submit(batch, batch.indices, None, batch.worker)
            return
        bounds = [rows * k // parts for k in range(parts + 1)]
        for k in range(parts):
            part = Part(bounds[k], bounds[k + 1], rows)
            worker = k if self._dispatch.mode == "probing" else None
            self._submit(batch, batch.indices[part.start : part.stop], part, worker)

    def _assign(self, batch: Batch) -> None:
        """Count `batch` as given to the worker whose turn it is."""
        batch.worker = self._dispatch.next_taker(in_order=True, most=1)
        if batch.worker is not None:
            self._dispatch.load[batch.worker] += 1

    def _submit(self, batch: Batch, indices: Any, part: Part | None, worker: int | None) -> None:
        if part is not None:
            batch.stops[part.start] = part.stop
        batch.left += 1
        self._seq += 1
        piece = Piece(self._seq, batch.number, indices, batch.slot, part, worker, into=batch)
        piece.epoch_seed = self._epoch_seed
        if self._lanes and worker is not None:
            self._cut_from_lane(piece, worker)
        if self.crew.is_absent:
            self.crew.pieces.append(piece)
        else:
            self.pool.submit(piece)

    def _cut_from_lane(self, piece: Piece, lane: int) -> None:
        piece.lane, piece.worker = lane, lane % self.pool.size
        self._lane_batches[lane] += 1
        piece.snapshot = self._snapshot_every > 0 and self._lane_batches[lane] % self._snapshot_every == 0

    # ── hearing back ────────────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
        idle = 0
        if self._dispatch.mode == "demand" and not self._exhausted:
            idle = max(0, self.pool.size - sum(batch.left for batch in self._batches.values()))
        began = time.perf_counter_ns()
        events = self._make_or_collect()
        waited_ns = time.perf_counter_ns() - began
        self._counters.wait_ns += waited_ns
        if self._counters.recorder is not None:
            self._counters.recorder.add("wait", began, began + waited_ns, self._counters.epochs, self._next_out)
        if idle:
            self._dispatch.starved(waited_ns * idle)
        if not events:
            raise WorkerTimeoutError(self._timeout_words())
        self._act_on(events)

    def _make_or_collect(self) -> list[Report | Death]:
        if self.crew.pieces:
            return [self.crew.make(), *self.pool.collect(0.0)]
        return self.pool.collect(self._timeout_s)

    def _act_on(self, events: list[Report | Death]) -> None:
        for event in events:
            if isinstance(event, Death):
                self._mourn(event)
            else:
                self._hear(event)

    def _hear(self, report: Report) -> None:
        piece = report.piece
        assert piece is not None
        batch: Batch = piece.into
        self._deaths.heard()
        if piece.cancelled or batch.cancelled:
            if report.oversize is not None:
                report.oversize.close()
            self._retire_cancelled(piece)
            return
        self._counters.fetch_ns += report.fetch_ns
        self._counters.collate_ns += report.collate_ns
        if self._counters.recorder is not None:
            _record(self._counters.recorder, report, piece, self._counters.epochs)
        self._counters.skip(report.skipped)
        batch.left -= 1
        batch.work_ns += report.fetch_ns + report.collate_ns
        batch.evidence = batch.evidence or report.evidence
        if self._lanes and not report.ended:
            size = len(piece.indices) if self._job.auto_collation else 1
            self._lanes[piece.lane] = self._lanes[piece.lane].after(size, report.state)
        self._take(batch, piece, report)
        if batch.left:
            return
        if not self._send_again(batch, piece):
            self._settle(batch)

    def _send_again(self, batch: Batch, piece: Piece) -> bool:
        """Draw the conclusions from a batch whose pieces are all back; return whether one had to go out again."""
        if self._dispatch.mode == "probing" and piece.part is not None and batch.evidence:
            self._dispatch.decide(batch.evidence)
            self._go_on_alone(batch)
        elif self._dispatch.mode in ("probing", "demand"):
            is_first = self._dispatch.mode == "probing"
            self._dispatch.decide(batch.evidence)
            if is_first and batch.evidence:
                self.crew.fix()
        if not batch.left and batch.error is None and batch.parts_disagree:
            self._make_whole(batch)
        return batch.left > 0

    def _take(self, batch: Batch, piece: Piece, report: Report) -> None:
        """Put what a piece brought into its batch."""
        batch.take(report, piece.part.start if piece.part is not None else 0, self._ring)
        if batch.has_ended:
            self._dispatch.active[piece.lane] = False
            self._lanes[piece.lane] = replace(self._lanes[piece.lane], has_ended=True)

    def _go_on_alone(self, batch: Batch) -> None:
        """Turn the first batch, which all workers filled to find out whether they may, into torch's worker 0's.

        Worker 0 has made just what torch's worker 0 would have made first, and goes on with the remaining rows. What
        the others made is thrown away, and their random states go back to where they were.
        """
        own = batch.stops[0]
        first = batch.parts.get(0)
        batch.stops = {0: own}
        batch.parts = {} if first is None else {0: first}
        for worker in range(1, self.pool.size):
            self.pool.rewind(worker)
        self.crew.fix()
        self._assign(batch)
        if first is None:  # worker 0's own rows failed, as they would have failed in torch
            return
        batch.error = None
        batch.samples, batch.nbytes = first.samples, first.nbytes
        rows = len(batch.indices)
        self._submit(batch, batch.indices[own:], Part(own, rows, rows), 0)

    def _make_whole(self, batch: Batch) -> None:
        """Have one worker make a batch whose parts have samples of different moulds, and split no more."""
        self._dispatch.forbid_splitting()
        batch.parts, batch.stops, batch.samples = {}, {}, 0
        self._submit(batch, batch.indices, None, batch.worker)

    def _settle(self, batch: Batch) -> None:
        """Put a finished batch where it will be handed out."""
        if batch.worker is not None:
            self._dispatch.load[batch.worker] -= 1
        batch.settle(self._ring)
        if batch.error is None and not batch.void:
            self._dispatch.learn(batch.work_ns)
        self._counters.dispatch, self._counters.dispatch_reason = self._dispatch.mode, self._dispatch.reason
        if not self._in_order:
            del self._batches[batch.number]
            if batch.void:
                self._under_way -= 1
                self.unused.append(batch.used)
            else:
                self._ready.append(batch)

    def _retire_cancelled(self, piece: Piece) -> None:
        batch: Batch = piece.into
        batch.left -= 1
        if batch.left == 0:
            batch.drop(self._ring)

    # ── deaths ──────────────────────────────────────────────────────────────────────────────────────────────

    def _mourn(self, death: Death) -> None:
        """Replace a dead worker and give its work out again, unless a sample has killed too many."""
        blamed = death.blamed
        try:
            if blamed is None and not death.is_innocent:
                self._deaths.at_the_start(death)
            elif blamed is not None and self._dispatch.mode == "stream":
                self._deaths.on_stream(death, blamed.lane, blamed.batch)
        except WorkerError:
            self.close()
            raise
        if not death.is_retired:
            self._counters.restarts += 1
            self.pool.replace(death.worker, self._lanes)
        self.crew.mourn()
        for piece in sorted(death.lost, key=lambda piece: piece.seq):
            if piece.cancelled:
                self._retire_cancelled(piece)
            elif piece is blamed and self._deaths.condemn(piece, death):
                self._quarantine(piece, death)
            else:
                self._counters.reissued += 1
                piece.into.left -= 1
                gone = piece.worker is not None and piece.worker >= self.pool.size
                worker = piece.lane if self._lanes else piece.worker
                self._submit(piece.into, piece.indices, piece.part, None if gone else worker)

    def _quarantine(self, piece: Piece, death: Death) -> None:
        batch: Batch = piece.into
        index = self._deaths.culprit(piece, death.row)
        self._counters.quarantined.append(index)
        batch.left -= 1
        if self._job.errors == "raise":
            batch.error = self._deaths.sentence(index, death)
        else:
            self._counters.skip([(index, death.cause)])
            kept = [other for other in piece.indices if other is not index] if self._job.auto_collation else []
            if index is not piece.indices and kept:
                self._submit(batch, kept, None, piece.worker)
            else:
                batch.void = True
        if batch.left == 0:
            self._settle(batch)

    def _timeout_words(self) -> str:
        words = [f"DataLoader timed out after {self._timeout_s:g} seconds"]
        for worker, process in enumerate(self.pool.processes):
            piece, row = self.pool.piece(worker)
            if piece is not None and not piece.cancelled:
                what = "its stream" if self._job.iterable else f"sample {self._deaths.culprit(piece, row)!r}"
                words.append(f"worker {worker} (pid {process.pid}) is at {what}")
        return "; ".join([*words, "raise timeout, or look at what those samples wait for"])


def _record(recorder: Recorder, report: Report, piece: Piece, epoch: int) -> None:
    recorder.add(
        "make",
        report.began_ns,
        report.began_ns + report.fetch_ns + report.collate_ns,
        epoch=epoch,
        batch=piece.batch,
        pid=report.pid,
        worker=report.worker,
        fetch_ns=report.fetch_ns,
        collate_ns=report.collate_ns,
        row=piece.part.start if piece.part is not None else 0,
        samples=report.samples,
    )


def _close(pool: Pool, ring: Ring) -> None:
    ring.announce = lambda number, slab: None
    pool.close()
