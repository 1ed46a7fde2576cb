"""The page's figures as data: series of a run's time series as paths, in the units of their axes. html.py draws them.

A path's coordinates are the figure's own values: seconds to the right, values upward. So the page shows the value under
the pointer from the path itself, and a zoom is another view box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.core.units import size_text
from penstock.observe.record.formatting import percent_text, rate_text, time_text
from penstock.observe.record.run_record import RunRecord
from penstock.observe.record.time_series import Span, TimeSeries
from penstock.observe.record.timeline import TimelinePoint

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One series of a figure, as steps."""

    label: str
    """Its name in the legend."""

    role: str
    """Its colour in the palette."""

    path: str
    """An SVG path: `M x,y`, then `H` to where a value ends and `V` to the next one. Of a stacked trace, the sum with
    all traces before it, closed down to 0."""

    is_stacked: bool = False
    """Whether it is an area upon the traces before it; else a line."""

    is_dotted: bool = False
    """Whether its line is dotted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure, with its title, legend and description."""

    name: str
    """Short and unique; the element's id."""

    title: str
    """What the figure shows."""

    description: str
    """The content as text, for readers who do not see the figure."""

    traces: tuple[Trace, ...]
    """What is drawn, the lowest of a stack first."""

    end_s: float
    """The end of the time axis; it begins at 0."""

    top: float
    """The end of the value axis; it begins at 0."""

    ticks: tuple[tuple[float, str], ...]
    """Values with a line and a label."""

    unit: str
    """What is written after a value; empty for counts."""

    height: int
    """In pixels, so that the layout is known before the figure is drawn."""


def figures(record: RunRecord, series: TimeSeries) -> list[Figure]:
    """Return the figures for which there is data: of `record`, whose timeline is `series`."""
    found: list[Figure] = []
    if series.spans:
        found += [_time_figure(record, series), _rate_figure(series)]
        if any(span.reading or span.collating for span in series.spans):
            found.append(_worker_figure(series))
    if series.points:
        if any(point.ready or point.held for point in series.points):
            found.append(_queue_figure(series))
        found += _memory_figures(series)
    if any(span.device_utilization is not None for span in series.spans):
        found.append(_utilization_figure(series))
    return found


def time_unit(end_s: float) -> tuple[str, float]:
    """Return the unit of a time axis that ends at `end_s`, and its seconds."""
    if end_s > 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if end_s > 300 else ("s", 1.0)


def round_steps(end: float, most: int) -> list[float]:
    """Return round values from 0 to `end`, at most `most` + 1 of them, in steps of 1, 2 or 5 times a power of ten.

    >>> round_steps(73.0, 4), round_steps(0.9, 4)
    ([0, 20, 40, 60], [0.0, 0.5])
    """
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = int(step) if step >= 1 else step
    return [k * step for k in range(int(end / step + 1e-9) + 1)]


# ── the figures ─────────────────────────────────────────────────────────────────────────────────────────────


def _time_figure(record: RunRecord, series: TimeSeries) -> Figure:
    roles = (("step", "step"), ("waiting for data", "waiting"), ("outside of loops", "outside"))
    spans, totals = series.spans, record.totals
    worst = max(spans, key=lambda span: span.waiting)
    traces = _stacked_traces(
        spans, [(label, role, [100 * getattr(span, role) for span in spans]) for label, role in roles]
    )
    description = (
        f"In loops, the step waited for data {percent_text(totals.stall_fraction)} of the time. It waited most, "
        f"{percent_text(worst.waiting)}, in the {time_text(worst.to_s - worst.from_s)} that began after "
        f"{time_text(worst.from_s)}."
    )
    title = "How the training process spent its time"
    return _per_cent_figure("time", title, description, traces, spans, height=240)


def _rate_figure(series: TimeSeries) -> Figure:
    values = [span.samples_per_s for span in series.spans]
    trace = Trace(label="samples per second of wall clock", role="rate", path=_steps(series.spans, values))
    description = f"Throughput was between {rate_text(min(values))} and {rate_text(max(values))} of wall clock."
    return _figure("rate", "Throughput", description, (trace,), series.spans[-1].to_s, max(values), "samples/s")


def _worker_figure(series: TimeSeries) -> Figure:
    spans = series.spans
    traces = _stacked_traces(
        spans,
        [
            ("reading and decoding", "fetch", [span.reading for span in spans]),
            ("collating", "collate", [span.collating for span in spans]),
        ],
    )
    busy = max(span.reading + span.collating for span in spans)
    most = max(span.workers for span in spans)
    if not most:
        description = f"At most {busy:.1f} of the loop's time, which makes its batches itself."
        return _figure("workers", "Reading and collating", description, traces, spans[-1].to_s, max(1.0, busy), "")
    path = _steps(spans, [span.workers for span in spans])
    traces = (*traces, Trace(label="all workers", role="outside", path=path, is_dotted=True))
    description = f"At most {busy:.1f} workers of {most} were busy, on average over an interval."
    return _figure("workers", "Busy workers", description, traces, spans[-1].to_s, max(most, busy), "")


def _queue_figure(series: TimeSeries) -> Figure:
    roles = (("ready, not handed out yet", "ready"), ("held by the program", "held"))
    traces = tuple(Trace(label=label, role=role, path=_points(series, _field(role))) for label, role in roles)
    ready, held = (max(getattr(point, role) for point in series.points) for _, role in roles)
    description = f"At most {ready} were ready and {held} held at a time."
    end_s = series.points[-1].at_s
    return _figure("queue", "Batches ready and held", description, traces, end_s, max(ready, held), "")


def _memory_figures(series: TimeSeries) -> list[Figure]:
    host = (("host, all processes", "host", "host_nbytes"), ("slots (shared by all)", "slots", "slots_nbytes"))
    device = (
        ("allocated", "device", "device_nbytes"),
        ("the most so far", "optimizer", "device_peak_nbytes"),
        ("reserved by torch", "reserved", "device_reserved_nbytes"),
    )
    found = (
        _memory_figure(series, "memory", "Host memory", host),
        _memory_figure(series, "gpu", "Device memory", device),
    )
    return [figure for figure in found if figure is not None]


def _memory_figure(series: TimeSeries, name: str, title: str, every: Sequence[tuple[str, str, str]]) -> Figure | None:
    points = series.points
    peaks = {label: max(getattr(point, field) or 0 for point in points) for label, _, field in every}
    most = max(peaks.values())
    if not most:
        return None
    unit, unit_nbytes = ("GiB", _GIB) if most >= _GIB else ("MiB", _MIB)
    traces = tuple(
        Trace(label=label, role=role, path=_points(series, _in_units(field, unit_nbytes)))
        for label, role, field in every
        if peaks[label]
    )
    shown = "; ".join(f"{label} {size_text(peak)}" for label, peak in peaks.items() if peak)
    description = f"The most at one of these times: {shown}."
    return _figure(name, title, description, traces, points[-1].at_s, most / unit_nbytes, unit)


def _utilization_figure(series: TimeSeries) -> Figure:
    spans = series.spans
    values = [None if span.device_utilization is None else 100 * span.device_utilization for span in spans]
    known = [
        (span.device_utilization, span.to_s - span.from_s) for span in spans if span.device_utilization is not None
    ]
    mean = sum(share * seconds for share, seconds in known) / sum(seconds for _, seconds in known)
    trace = Trace(label="the device ran a kernel", role="busy", path=_steps(spans, values))
    description = f"The device ran a kernel in {percent_text(mean)} of the time."
    return _per_cent_figure("device", "Device utilisation", description, (trace,), spans, height=180)


# ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────


def _figure(
    name: str, title: str, description: str, traces: tuple[Trace, ...], end_s: float, most: float, unit: str
) -> Figure:
    """Return a figure whose value axis ends a little above `most`."""
    top = (most or 1.0) * 1.08
    steps = round_steps(top, 4)
    if not unit and top >= 1:
        steps = [step for step in steps if step == int(step)]
    ticks = tuple((step, _number(step)) for step in steps)
    return Figure(
        name=name,
        title=title,
        description=description,
        traces=traces,
        end_s=end_s,
        top=top,
        ticks=ticks,
        unit=unit,
        height=190,
    )


def _per_cent_figure(
    name: str, title: str, description: str, traces: tuple[Trace, ...], spans: Sequence[Span], *, height: int
) -> Figure:
    return Figure(
        name=name,
        title=title,
        description=description,
        traces=traces,
        end_s=spans[-1].to_s,
        top=100.0,
        ticks=((0, "0"), (50, "50"), (100, "100 %")),
        unit="%",
        height=height,
    )


def _stacked_traces(spans: Sequence[Span], every: Sequence[tuple[str, str, Sequence[float]]]) -> tuple[Trace, ...]:
    found, sums = [], [0.0] * len(spans)
    for label, role, values in every:
        sums = [below + value for below, value in zip(sums, values, strict=True)]
        found.append(Trace(label=label, role=role, path=f"{_steps(spans, sums)}V0H0Z", is_stacked=True))
    return tuple(found)


def _steps(spans: Sequence[Span], values: Sequence[float | None]) -> str:
    """Return the path of one value for each span; where it is not known, the last one goes on."""
    return _path([(span.from_s, value) for span, value in zip(spans, values, strict=True)], spans[-1].to_s)


def _points(series: TimeSeries, value: Callable[[TimelinePoint], float | None]) -> str:
    """Return the path of one value for each point, which holds until the next one."""
    return _path([(point.at_s, value(point)) for point in series.points], series.points[-1].at_s)


def _path(values: Iterable[tuple[float, float | None]], end_s: float) -> str:
    known = [(f"{at_s:.6g}", f"{value:.5g}") for at_s, value in values if value is not None]
    changes = [one for k, one in enumerate(known) if not k or one[1] != known[k - 1][1]]
    (first_x, first_y), *rest = changes
    return f"M{first_x},{first_y}{''.join(f'H{x}V{y}' for x, y in rest)}H{end_s:.6g}"


def _field(name: str) -> Callable[[TimelinePoint], float | None]:
    return lambda point: float(getattr(point, name))


def _in_units(field: str, unit_nbytes: float) -> Callable[[TimelinePoint], float | None]:
    def value(point: TimelinePoint) -> float | None:
        nbytes = getattr(point, field)
        return None if nbytes is None else nbytes / unit_nbytes

    return value


def _number(value: float) -> str:
    """Return a tick's label.

    >>> _number(0.5), _number(20), _number(1500), _number(2500000)
    ('0.5', '20', '1.5k', '2.5M')
    """
    unit, size = next((one for one in (("M", 1e6), ("k", 1e3)) if value >= one[1]), ("", 1))
    return f"{value / size:g}{unit}"
