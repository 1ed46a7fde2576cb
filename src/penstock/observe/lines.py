"""A pulse in words: the plain line, and the phrases that the panel is made of. Data in, text out."""

from __future__ import annotations

from penstock.observe.pulse import Pulse

_STAGES = (
    ("read+decode", "fetch_s"),
    ("collate", "collate_s"),
    ("transport", "transport_s"),
    ("wait", "wait_s"),
    ("step", "step_s"),
)


def progress(pulse: Pulse) -> str:
    """Return one line about a run under way.

    >>> from penstock.observe.timeline import Moment
    >>> progress(Pulse(pid=1, moment=Moment(at_s=9), loader="Images", epoch=2, batch=3, length=8, samples_per_s=1250))
    'Images: epoch 2, batch 3/8 · 1 250 samples/s · waited for data 0.0% of the time · 0 ready'
    """
    if not pulse.loader:
        return "no batch yet"
    parts = [
        f"{pulse.loader}: {place(pulse)}",
        rate(pulse.samples_per_s),
        f"waited for data {pulse.stall_share:.1%} of the time",
        f"{pulse.moment.ready} ready",
    ]
    if pulse.eta_s is not None:
        parts.append(f"{clock(pulse.eta_s)} left in the epoch")
    if pulse.world_size > 1:
        parts.append(f"rank {pulse.rank} of {pulse.world_size}")
    return " · ".join(parts)


def place(pulse: Pulse) -> str:
    """Return where the loop is, as in "epoch 2, batch 3/8"."""
    if pulse.length:
        return f"epoch {pulse.epoch}, batch {pulse.batch}/{pulse.length}"
    return f"batch {pulse.batch}"


def rate(samples_per_s: float) -> str:
    """Return a throughput.

    >>> rate(12345.6)
    '12 346 samples/s'
    """
    is_plain = samples_per_s >= 10 or samples_per_s == round(samples_per_s)
    figure = f"{samples_per_s:,.0f}" if is_plain else f"{samples_per_s:.1f}"
    return f"{figure} samples/s".replace(",", " ")


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it.

    >>> clock(75.2), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def worker_states(pulse: Pulse) -> str:
    """Return what the workers do, as in "3 work, 1 waits"."""
    workers, working, starting = pulse.moment.workers, pulse.moment.working, pulse.starting
    counted = (
        (working, "works", "work"),
        (max(0, workers - working - starting), "waits", "wait"),
        (starting, "starting", "starting"),
        (pulse.restarts, "replaced", "replaced"),
    )
    return ", ".join(f"{count} {one if count == 1 else more}" for count, one, more in counted if count)


def per_batch_ms(pulse: Pulse) -> list[tuple[str, float]]:
    """Return the milliseconds that each stage took per batch lately; empty when there was no batch."""
    batches = pulse.batches_per_s * pulse.window_s
    if batches < 1e-9:
        return []
    return [(name, 1000 * getattr(pulse.stages, field) / batches) for name, field in _STAGES]
