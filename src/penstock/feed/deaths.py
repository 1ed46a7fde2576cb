"""Deaths of workers: which sample is to blame, how often one may kill, and what is said when it is enough."""

from __future__ import annotations

from collections import Counter
from typing import Any

from penstock.core.errors import WorkerKilledError, WorkerStartError
from penstock.feed.workers.base import Death, Piece
from penstock.feed.workers.maker import Job

_START_DEATHS = 3


class Deaths:
    """Counts the deaths of one loader's workers.

    Args:
        job: what the workers do.
        most: so many deaths condemn the sample on which they happened.
    """

    def __init__(self, job: Job, most: int) -> None:
        self.most = most
        self._job = job
        self._counted: Counter[Any] = Counter()
        self._idle = 0

    def heard(self) -> None:
        """Take note that a worker has made something: workers that start can work."""
        self._idle = 0

    def at_the_start(self, death: Death) -> None:
        """Count a worker that died with nothing to do.

        Raises:
            WorkerStartError: so many in a row have not come to their first piece.
        """
        self._idle += 1
        if self._idle >= _START_DEATHS:
            raise WorkerStartError(
                f"DataLoader worker (pid {death.pid}) {death.cause} {self._idle} workers have ended like this before "
                "they made anything; look above for what they printed, and check that the machine has memory for "
                "num_workers processes"
            )

    def on_stream(self, death: Death, lane: int, batch: int) -> None:
        """Count a death on a batch of a lane of an iterable dataset.

        Raises:
            WorkerKilledError: it is condemned, and a stream cannot be read around it.
        """
        self._counted[lane, batch] += 1
        if self._counted[lane, batch] >= self.most:
            raise WorkerKilledError(
                f"DataLoader worker (pid {death.pid}) {death.cause} {self.most} workers have died on batch {batch} "
                f"of this epoch, in the stream of worker {lane}; an iterable dataset cannot be read around it"
            )

    def condemn(self, piece: Piece, death: Death) -> bool:
        """Count a death on a sample, and say whether it is condemned."""
        if self._job.iterable:
            return False
        key = repr(self.culprit(piece, death.row))
        self._counted[key] += 1
        return self._counted[key] >= self.most

    def culprit(self, piece: Piece, row: int) -> Any:
        """Return the index that was being made: one sample's, or all of a batch made in one call."""
        if not self._job.auto_collation or getattr(self._job.dataset, "__getitems__", None):
            return piece.indices
        return piece.indices[min(row, len(piece.indices) - 1)]

    def sentence(self, index: Any, death: Death) -> WorkerKilledError:
        """Return the error that a condemned sample is."""
        return WorkerKilledError(
            f"DataLoader worker (pid {death.pid}) {death.cause} It was making sample {index!r}, on which "
            f"{self.most} workers have died. Look at that sample (out of memory? a crash in its decoder?), "
            "or pass errors='skip' to leave such samples out"
        )
