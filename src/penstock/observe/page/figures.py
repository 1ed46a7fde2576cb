"""The page's figures, made with plotly from a run's course. In the light colours; see palette.py.

Names of the user's own never come in here, so that nothing has to be kept from plotly's reading of tags in text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.units import size_text
from penstock.observe.course import Course, Span
from penstock.observe.page.palette import LIGHT
from penstock.observe.timeline import Moment
from penstock.observe.wording import rate_text, share_text, time_text

_GIB = 1 << 30
_MIB = 1 << 20
_PER_CENT = {"range": [0, 100], "tickvals": [0, 50, 100], "ticktext": ["0 %", "50 %", "100 %"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure, with what stands around it."""

    name: str
    """Short, unique; the element's id."""

    title: str
    """What is drawn."""

    words: str
    """What is to be seen, for who cannot or does not want to look."""

    legend: tuple[tuple[str, str], ...]
    """Label and role of each trace."""

    plot: Any
    """A plotly `Figure`."""

    height: int
    """In pixels, so that the page does not move when it is drawn."""


def figures(course: Course) -> list[Figure]:
    """Return the figures that there is data for."""
    found: list[Figure] = []
    if course.spans:
        found += [_time(course), _rate(course)]
        if any(span.reading or span.collating for span in course.spans):
            found.append(_workers(course))
    if course.moments:
        if any(moment.ready or moment.held for moment in course.moments):
            found.append(_queue(course))
        if any(moment.slots_nbytes or moment.host_nbytes or moment.device_nbytes for moment in course.moments):
            found.append(_memory(course))
    if any(span.device_busy is not None for span in course.spans):
        found.append(_busy(course))
    return found


# ── the figures ─────────────────────────────────────────────────────────────────────────────────────────────


def _time(course: Course) -> Figure:
    spans = course.spans
    legend = (
        ("step", "step"),
        ("waiting for data", "waiting"),
        ("transport", "transport"),
        ("outside of loops", "outside"),
    )
    plot = _plot(_unit(course), "share of the time", yaxis=_PER_CENT)
    for label, role in legend:
        _steps(
            plot, course, label, role, [100 * getattr(span, role) for span in spans], stack="time", hover="%{y:.0f} %"
        )
    worst = max(spans, key=lambda span: span.waiting)
    mean = {role: _mean(spans, role) for _, role in legend}
    words = (
        f"Of the run's time, {share_text(mean['step'])} went into the step, {share_text(mean['waiting'])} into waiting "
        f"for data, {share_text(mean['transport'])} into transport and {share_text(mean['outside'])} were outside of "
        f"loops. The longest waiting, {share_text(worst.waiting)}, began after {time_text(worst.from_s)}."
    )
    title = "How the training process spent its time"
    return Figure(name="time", title=title, words=words, legend=legend, plot=plot, height=260)


def _rate(course: Course) -> Figure:
    plot = _plot(_unit(course), "samples per second", yaxis={"rangemode": "tozero", "tickformat": "~s"})
    values = [span.samples_per_s for span in course.spans]
    _steps(plot, course, "samples/s", "rate", values, hover="%{y:,.0f} samples/s", width=2)
    words = f"Throughput lay between {rate_text(min(values))} and {rate_text(max(values))} of wall clock."
    legend = (("samples per second of wall clock", "rate"),)
    return Figure(name="rate", title="Throughput", words=words, legend=legend, plot=plot, height=200)


def _workers(course: Course) -> Figure:
    spans = course.spans
    legend: tuple[tuple[str, str], ...] = (("reading and decoding", "fetch"), ("collating", "collate"))
    plot = _plot(_unit(course), "busy, on average", yaxis={"rangemode": "tozero"})
    for label, role, values in (
        (*legend[0], [span.reading for span in spans]),
        (*legend[1], [span.collating for span in spans]),
    ):
        _steps(plot, course, label, role, values, stack="work", hover="%{y:.2f}")
    busy = [span.reading + span.collating for span in spans]
    most = max(span.workers for span in spans)
    words = f"At most {max(busy):.1f} were busy at a time"
    words += f", of {most} workers." if most else "; without workers, that is the loop itself."
    if most:
        _steps(
            plot, course, "workers", "outside", [span.workers for span in spans], hover="%{y}", width=1.5, dash="dot"
        )
        legend = (*legend, ("workers there are", "outside"))
    title = "Workers at work" if most else "Reading and collating"
    return Figure(name="workers", title=title, words=words, legend=legend, plot=plot, height=220)


def _queue(course: Course) -> Figure:
    legend = (("ready, waiting to be asked for", "ready"), ("held, still looked at", "held"))
    most = max(max(moment.ready, moment.held) for moment in course.moments)
    plot = _plot(_unit(course), "batches", yaxis={"rangemode": "tozero", "tick0": 0, "dtick": max(1, -(-most // 4))})
    for label, role in legend:
        _lines(plot, course, label.partition(",")[0], role, _count(role), "%{y}")
    ready, held = (max(getattr(moment, role) for moment in course.moments) for _, role in legend)
    words = f"At most {ready} were ready and {held} held at a time."
    return Figure(name="queue", title="Batches ready and held", words=words, legend=legend, plot=plot, height=200)


def _memory(course: Course) -> Figure:
    moments = course.moments
    every = (
        ("host, all processes", "host", "host_nbytes"),
        ("slots (shared by all)", "slots", "slots_nbytes"),
        ("device, tensors", "device", "device_nbytes"),
        ("device, reserved by torch", "reserved", "device_reserved_nbytes"),
    )
    shown = [one for one in every if any(getattr(moment, one[2]) for moment in moments)]
    most = max(getattr(moment, field) or 0 for moment in moments for _, _, field in shown)
    unit, unit_nbytes = ("GiB", _GIB) if most >= _GIB else ("MiB", _MIB)
    plot = _plot(_unit(course), unit, yaxis={"rangemode": "tozero"})
    for label, role, field in shown:
        _lines(plot, course, label, role, _in_units(field, unit_nbytes), f"%{{y:.3~g}} {unit}")
    peaks = [f"{label} {size_text(max(getattr(m, field) or 0 for m in moments))}" for label, _, field in shown]
    words = f"Peaks: {'; '.join(peaks)}."
    legend = tuple((label, role) for label, role, _ in shown)
    return Figure(name="memory", title="Memory by role", words=words, legend=legend, plot=plot, height=220)


def _busy(course: Course) -> Figure:
    plot = _plot(_unit(course), "share of the time", yaxis=_PER_CENT)
    values = [None if span.device_busy is None else 100 * span.device_busy for span in course.spans]
    _steps(plot, course, "busy", "busy", values, hover="%{y:.0f} %", width=2)
    known = [value for value in values if value is not None]
    words = f"The device ran something in {share_text(sum(known) / len(known) / 100)} of the time."
    legend = (("the device ran something", "busy"),)
    return Figure(name="device", title="Device utilisation", words=words, legend=legend, plot=plot, height=200)


# ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────


def _unit(course: Course) -> tuple[str, float]:
    """Return the unit that the run's time is best read in, and its seconds."""
    end_s = course.moments[-1].at_s
    if end_s > 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if end_s > 300 else ("s", 1.0)


def _plot(unit: tuple[str, float], ylabel: str, *, yaxis: dict[str, Any]) -> Any:
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


def _steps(
    plot: Any,
    course: Course,
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
    edges = [span.from_s for span in course.spans] + [course.spans[-1].to_s]
    plot.add_scatter(
        x=_short(edge / unit_s for edge in edges),
        y=_short([*values, values[-1]]),
        name=label,
        mode="lines",
        line={"shape": "hv", "width": width, "color": LIGHT[role], "dash": dash},
        stackgroup=stack,
        fillcolor=LIGHT[role] if stack else None,
        hovertemplate=hover,
    )


def _lines(
    plot: Any, course: Course, label: str, role: str, value: Callable[[Moment], float | None], hover: str
) -> None:
    """Draw one value for each moment."""
    unit_s = plot.layout.meta["unit_s"]
    plot.add_scatter(
        x=_short(moment.at_s / unit_s for moment in course.moments),
        y=_short(map(value, course.moments)),
        name=label,
        mode="lines",
        connectgaps=True,
        line={"shape": "hv", "width": 2, "color": LIGHT[role]},
        hovertemplate=hover,
    )


def _in_units(field: str, unit_nbytes: int) -> Callable[[Moment], float | None]:
    def value(moment: Moment) -> float | None:
        nbytes = getattr(moment, field)
        return None if nbytes is None else nbytes / unit_nbytes

    return value


def _count(field: str) -> Callable[[Moment], float | None]:
    return lambda moment: float(getattr(moment, field))


def _mean(spans: Sequence[Span], role: str) -> float:
    whole_s = sum(span.to_s - span.from_s for span in spans)
    return float(sum(getattr(span, role) * (span.to_s - span.from_s) for span in spans) / whole_s)


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Return the values with as many digits as can be seen: the page is smaller by half."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
