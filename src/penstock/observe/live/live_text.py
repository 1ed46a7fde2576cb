"""A live snapshot as text: the plain progress line, and the phrases of the panel. Data in, text out."""

from __future__ import annotations

from penstock.core.urls import printable
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.record.formatting import percent_text, rate_text
from penstock.observe.record.run_record import label_of

_STAGES = (
    ("read+decode", "fetch_s"),
    ("collate", "collate_s"),
    ("transport", "transport_s"),
    ("wait", "wait_s"),
    ("step", "step_s"),
)


def progress_line(snapshot: LiveSnapshot, *, is_short: bool = False) -> str:
    """Return one line about a run; a short one does not say where its loader was made.

    >>> from penstock.observe.record.timeline import TimelinePoint
    >>> now = TimelinePoint(at_s=9)
    >>> progress_line(LiveSnapshot(pid=1, now=now, loader="Images", epoch=2, batch=3, length=8, samples_per_s=1250))
    'Images: epoch 2, batch 3/8 · 1 250 samples/s · waited for data 0 % of the time · 0 ready'
    """
    if not snapshot.loader:
        return "no batch yet"
    parts = [
        f"{printable(snapshot.loader) if is_short else loader_text(snapshot)}: {position_text(snapshot)}",
        rate_text(snapshot.samples_per_s),
        f"waited for data {percent_text(snapshot.stall_fraction)} of the time",
    ]
    if not snapshot.is_watched:
        parts.append(f"{snapshot.now.ready} ready")
    if snapshot.eta_s is not None:
        parts.append(f"{clock_text(snapshot.eta_s)} left in the epoch")
    if snapshot.world_size > 1:
        parts.append(f"rank {snapshot.rank} of {snapshot.world_size}")
    return " · ".join(parts)


def loader_text(snapshot: LiveSnapshot) -> str:
    """Return the name of the loader, and where it was made."""
    return printable(label_of(snapshot.loader, snapshot.made_at))


def position_text(snapshot: LiveSnapshot) -> str:
    """Return where the loop is, as in "epoch 2, batch 3/8"."""
    if snapshot.length:
        return f"epoch {snapshot.epoch}, batch {snapshot.batch}/{snapshot.length}"
    return f"batch {snapshot.batch}"


def clock_text(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock_text(75.2), clock_text(3725)
    ('1:15', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def worker_states_text(snapshot: LiveSnapshot) -> str:
    """Return what the workers are doing, as in "3 work, 1 waits"."""
    workers, working, starting = snapshot.now.workers, snapshot.now.working, snapshot.starting
    states = (
        (working, "works", "work"),
        (max(0, workers - working - starting), "waits", "wait"),
        (starting, "starting", "starting"),
        (snapshot.restarts, "replaced", "replaced"),
    )
    return ", ".join(f"{count} {one if count == 1 else more}" for count, one, more in states if count)


def stage_ms_per_batch(snapshot: LiveSnapshot) -> list[tuple[str, float]]:
    """Return the milliseconds per batch of each known stage over the last window; empty if it has no batch."""
    batches = snapshot.batches_per_s * snapshot.window_s
    stages = _STAGES[-2:] if snapshot.is_watched else _STAGES
    if batches < 1e-9:
        return []
    return [(name, 1000 * getattr(snapshot.stages, field) / batches) for name, field in stages]
