"""The page's figures, drawn with plotly from a run's time series. In the light colours; see palette.py.

Figures contain no text from the user: plotly interprets tags in text, and there is nothing to escape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.units import size_text
from penstock.observe.page.palette import LIGHT
from penstock.observe.record.formatting import percent_text, rate_text, time_text
from penstock.observe.record.time_series import Span, TimeSeries
from penstock.observe.record.timeline import TimelinePoint

_GIB = 1 << 30
_MIB = 1 << 20
_PER_CENT = {"range": [0, 100], "tickvals": [0, 50, 100], "ticktext": ["0 %", "50 %", "100 %"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure, with its title, legend and description."""

    name: str
    """Short and unique; the element's id."""

    title: str
    """What the figure shows."""

    description: str
    """The content as text, for readers who do not see the figure."""

    legend: tuple[tuple[str, str], ...]
    """Label and role of each trace."""

    plot: Any
    """A plotly `Figure`."""

    height: int
    """In pixels, so that the layout does not change when the figure is drawn."""


def figures(series: TimeSeries) -> list[Figure]:
    """Return the figures for which there is data."""
    found: list[Figure] = []
    if series.spans:
        found += [_time_figure(series), _rate_figure(series)]
        if any(span.reading or span.collating for span in series.spans):
            found.append(_worker_figure(series))
    if series.points:
        if any(point.ready or point.held for point in series.points):
            found.append(_queue_figure(series))
        if any(point.slots_nbytes or point.host_nbytes or point.device_nbytes for point in series.points):
            found.append(_memory_figure(series))
    if any(span.device_utilization is not None for span in series.spans):
        found.append(_utilization_figure(series))
    return found


# ── the figures ─────────────────────────────────────────────────────────────────────────────────────────────


def _time_figure(series: TimeSeries) -> Figure:
    spans = series.spans
    legend = (
        ("step", "step"),
        ("waiting for data", "waiting"),
        ("transport", "transport"),
        ("outside of loops", "outside"),
    )
    plot = _new_plot(_time_unit(series), "share of the time", yaxis=_PER_CENT)
    for label, role in legend:
        _draw_steps(
            plot, series, label, role, [100 * getattr(span, role) for span in spans], stack="time", hover="%{y:.0f} %"
        )
    worst = max(spans, key=lambda span: span.waiting)
    shares = {role: percent_text(_mean(spans, role)) for _, role in legend}
    description = (
        f"Of the run's time, {shares['step']} went into the step, {shares['waiting']} into waiting for data, "
        f"{shares['transport']} into transport and {shares['outside']} were outside of loops. The largest share of "
        f"waiting, {percent_text(worst.waiting)}, began after {time_text(worst.from_s)}."
    )
    title = "How the training process spent its time"
    return Figure(name="time", title=title, description=description, legend=legend, plot=plot, height=260)


def _rate_figure(series: TimeSeries) -> Figure:
    plot = _new_plot(_time_unit(series), "samples per second", yaxis={"rangemode": "tozero", "tickformat": "~s"})
    values = [span.samples_per_s for span in series.spans]
    _draw_steps(plot, series, "samples/s", "rate", values, hover="%{y:,.0f} samples/s", width=2)
    description = f"Throughput was between {rate_text(min(values))} and {rate_text(max(values))} of wall clock."
    legend = (("samples per second of wall clock", "rate"),)
    return Figure(name="rate", title="Throughput", description=description, legend=legend, plot=plot, height=200)


def _worker_figure(series: TimeSeries) -> Figure:
    spans = series.spans
    legend: tuple[tuple[str, str], ...] = (("reading and decoding", "fetch"), ("collating", "collate"))
    plot = _new_plot(_time_unit(series), "busy, on average", yaxis={"rangemode": "tozero"})
    for label, role, values in (
        (*legend[0], [span.reading for span in spans]),
        (*legend[1], [span.collating for span in spans]),
    ):
        _draw_steps(plot, series, label, role, values, stack="work", hover="%{y:.2f}")
    busy = [span.reading + span.collating for span in spans]
    most = max(span.workers for span in spans)
    description = f"At most {max(busy):.1f} were busy at a time"
    description += f", of {most} workers." if most else "; without workers, that is the loop itself."
    if most:
        _draw_steps(
            plot, series, "workers", "outside", [span.workers for span in spans], hover="%{y}", width=1.5, dash="dot"
        )
        legend = (*legend, ("all workers", "outside"))
    title = "Busy workers" if most else "Reading and collating"
    return Figure(name="workers", title=title, description=description, legend=legend, plot=plot, height=220)


def _queue_figure(series: TimeSeries) -> Figure:
    legend = (("ready, not handed out yet", "ready"), ("held by the program", "held"))
    most = max(max(point.ready, point.held) for point in series.points)
    plot = _new_plot(
        _time_unit(series), "batches", yaxis={"rangemode": "tozero", "tick0": 0, "dtick": max(1, -(-most // 4))}
    )
    for _, role in legend:
        _draw_lines(plot, series, role, role, _count(role), "%{y}")
    ready, held = (max(getattr(point, role) for point in series.points) for _, role in legend)
    description = f"At most {ready} were ready and {held} held at a time."
    return Figure(
        name="queue", title="Batches ready and held", description=description, legend=legend, plot=plot, height=200
    )


def _memory_figure(series: TimeSeries) -> Figure:
    points = series.points
    every = (
        ("host, all processes", "host", "host_nbytes"),
        ("slots (shared by all)", "slots", "slots_nbytes"),
        ("device, tensors", "device", "device_nbytes"),
        ("device, reserved by torch", "reserved", "device_reserved_nbytes"),
    )
    shown = [one for one in every if any(getattr(point, one[2]) for point in points)]
    most = max(getattr(point, field) or 0 for point in points for _, _, field in shown)
    unit, unit_nbytes = ("GiB", _GIB) if most >= _GIB else ("MiB", _MIB)
    plot = _new_plot(_time_unit(series), unit, yaxis={"rangemode": "tozero"})
    for label, role, field in shown:
        _draw_lines(plot, series, label, role, _in_units(field, unit_nbytes), f"%{{y:.3~g}} {unit}")
    peaks = [f"{label} {size_text(max(getattr(m, field) or 0 for m in points))}" for label, _, field in shown]
    description = f"Peaks: {'; '.join(peaks)}."
    legend = tuple((label, role) for label, role, _ in shown)
    return Figure(name="memory", title="Memory by role", description=description, legend=legend, plot=plot, height=220)


def _utilization_figure(series: TimeSeries) -> Figure:
    plot = _new_plot(_time_unit(series), "share of the time", yaxis=_PER_CENT)
    values = [None if span.device_utilization is None else 100 * span.device_utilization for span in series.spans]
    _draw_steps(plot, series, "busy", "busy", values, hover="%{y:.0f} %", width=2)
    known = [value for value in values if value is not None]
    description = f"The device ran a kernel in {percent_text(sum(known) / len(known) / 100)} of the time."
    legend = (("the device ran a kernel", "busy"),)
    return Figure(
        name="device", title="Device utilisation", description=description, legend=legend, plot=plot, height=200
    )


# ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────


def _time_unit(series: TimeSeries) -> tuple[str, float]:
    """Return the unit for the time axis, and its seconds."""
    end_s = series.points[-1].at_s
    if end_s > 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if end_s > 300 else ("s", 1.0)


def _new_plot(unit: tuple[str, float], ylabel: str, *, yaxis: dict[str, Any]) -> Any:
    import plotly.graph_objects as go

    axis = {"gridcolor": LIGHT["rule"], "zeroline": False, "fixedrange": True}
    return go.Figure(
        layout={
            "template": None,
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": LIGHT["muted"]},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 64, "r": 10, "t": 8, "b": 30},
            "showlegend": False,
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": LIGHT["card"], "bordercolor": LIGHT["rule"], "font": {"color": LIGHT["ink"]}},
            "xaxis": {
                **axis,
                "fixedrange": False,
                "showgrid": False,
                "linecolor": LIGHT["rule"],
                "ticks": "outside",
                "tickcolor": LIGHT["rule"],
                "hoverformat": ".4~g",
                "ticksuffix": f" {unit[0]}",
                "nticks": 8,
                "rangemode": "tozero",
            },
            "yaxis": {**axis, "nticks": 4, "title": {"text": ylabel, "standoff": 8}, **yaxis},
            "meta": {"unit_s": unit[1]},
        },
    )


def _draw_steps(
    plot: Any,
    series: TimeSeries,
    label: str,
    role: str,
    values: Sequence[float | None],
    *,
    hover: str,
    stack: str | None = None,
    width: float = 0,
    dash: str = "solid",
) -> None:
    """Draw one value for each span, as steps; stacked ones as areas."""
    unit_s = plot.layout.meta["unit_s"]
    edges = [span.from_s for span in series.spans] + [series.spans[-1].to_s]
    plot.add_scatter(
        x=_rounded(edge / unit_s for edge in edges),
        y=_rounded([*values, values[-1]]),
        name=label,
        mode="lines",
        line={"shape": "hv", "width": width, "color": LIGHT[role], "dash": dash},
        stackgroup=stack,
        fillcolor=LIGHT[role] if stack else None,
        hovertemplate=hover,
    )


def _draw_lines(
    plot: Any, series: TimeSeries, label: str, role: str, value: Callable[[TimelinePoint], float | None], hover: str
) -> None:
    """Draw one value for each point."""
    unit_s = plot.layout.meta["unit_s"]
    plot.add_scatter(
        x=_rounded(point.at_s / unit_s for point in series.points),
        y=_rounded(map(value, series.points)),
        name=label,
        mode="lines",
        connectgaps=True,
        line={"shape": "hv", "width": 2, "color": LIGHT[role]},
        hovertemplate=hover,
    )


def _in_units(field: str, unit_nbytes: int) -> Callable[[TimelinePoint], float | None]:
    def value(point: TimelinePoint) -> float | None:
        nbytes = getattr(point, field)
        return None if nbytes is None else nbytes / unit_nbytes

    return value


def _count(field: str) -> Callable[[TimelinePoint], float | None]:
    return lambda point: float(getattr(point, field))


def _mean(spans: Sequence[Span], role: str) -> float:
    whole_s = sum(span.to_s - span.from_s for span in spans)
    return float(sum(getattr(span, role) * (span.to_s - span.from_s) for span in spans) / whole_s)


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    """Return the values rounded to five digits, more than a figure resolves: the page is half as large."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
