"""Turns a `View` and its figures into HTML. Every text is escaped here, and only here."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from importlib import resources

from penstock import __version__
from penstock.core.urls import printable
from penstock.observe.record.formatting import percent_text
from penstock.observe.record.time_parts import Bar, Part
from penstock.observe.report import palette
from penstock.observe.report.figures import Figure, Trace, round_steps, time_unit
from penstock.observe.report.headline import Headline
from penstock.observe.report.view import FindingText, LoaderView, Tile, View

_MAX_CARDS = 12
"""Further loaders are collapsed into a table."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The page makes no request, and the browser enforces that."""


def page_html(view: View, figures: list[Figure]) -> str:
    """Return the whole page."""
    folder = resources.files("penstock.observe.report")
    css = palette.css() + folder.joinpath("page.css").read_text(encoding="utf-8")
    sections = [
        _bars(view.bars),
        _findings(view.findings),
        _device_memory(view.device_memory) if view.device_memory is not None else "",
        _figures(figures) if figures or view.loaders else "",
        _loaders(view.loaders),
        _machine(view.machine),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{_text(_truncated(view.title, 80))} – penstock</title><style>{css}</style></head>\n"
        f"<body>{_header(view)}\n<main>{''.join(sections)}</main>\n"
        f"<footer>penstock {_text(__version__)}</footer>\n{_script(figures)}</body></html>\n"
    )


def _header(view: View) -> str:
    """The main result, and then what follows."""
    failure = f'<div class="failure" role="alert">{_text(view.failure)}</div>' if view.failure else ""
    return (
        f'<header><div class="muted small"><code class="command">{_text(view.title)}</code>{_text(view.when)}</div>'
        f"{failure}{_headline(view.headline)}{_tiles(view.tiles)}</header>"
    )


def _headline(head: Headline) -> str:
    return (
        f'<h1><span class="mark {head.tone}" aria-hidden="true"></span>{_sentence(head.text)}</h1>'
        f'<p class="lead">{_sentence(head.more)}</p>'
    )


def _tiles(tiles: tuple[Tile, ...]) -> str:
    return f'<dl class="tiles">{"".join(map(_tile, tiles))}</dl>' if tiles else ""


def _tile(tile: Tile) -> str:
    return (
        f'<div class="tile"><dt>{_text(tile.label)}</dt><dd class="value">{_text(tile.value)}</dd>'
        f'<dd class="muted small">{_text(tile.note)}</dd></div>'
    )


def _bars(bars: tuple[Bar, ...]) -> str:
    if not bars:
        return ""
    return "<section><h2>Where each second went</h2>" + "".join(map(_bar, bars)) + "</section>"


def _device_memory(bar: Bar) -> str:
    return f"<section><h2>Device memory</h2>{_bar(bar)}</section>"


def _bar(bar: Bar) -> str:
    label = ", ".join(f"{part.label} {part.share}" for part in bar.parts)
    drawn = [inner for part in bar.parts for inner in part.parts or (part,)]
    pieces = "".join(
        f'<span style="flex:{part.amount / bar.amount:.5f} 1 0;background:var(--{part.role})" '
        f'title="{_text(part.label)}: {_text(part.text)}"></span>'
        for part in drawn
    )
    lines = "".join(
        _part(part) + "".join(_part(inner, kind=' class="inner"') for inner in part.parts) for part in bar.parts
    )
    return (
        f'<div class="card"><h3>{_text(bar.label)}: {_text(bar.text)}</h3>'
        f'<p class="muted small">{_text(bar.note)}</p>'
        f'<div class="bar" role="img" aria-label="{_text(label)}">{pieces}</div><ul class="parts">{lines}</ul></div>'
    )


def _part(part: Part, *, kind: str = "") -> str:
    return (
        f'<li{kind}><span class="chip" style="background:var(--{part.role})" aria-hidden="true"></span>'
        f'<span>{_text(part.label)}</span><span class="number">{_text(part.share)}</span>'
        f'<span class="number muted">{_text(part.text)}</span>'
        f'<span class="meaning muted small">{_text(part.meaning)}</span></li>'
    )


def _findings(findings: tuple[FindingText, ...]) -> str:
    if not findings:
        return ""
    return "<section><h2>Findings, and what to change</h2>" + "".join(map(_finding, findings)) + "</section>"


def _finding(finding: FindingText) -> str:
    gain = f'<span class="gain">{_text(finding.gain)}</span>' if finding.gain else ""
    remedy = f'<div class="remedy">{_text(finding.remedy)}</div>' if finding.remedy else ""
    return (
        f'<article class="card finding"><h3>{_text(finding.cause)}</h3>{gain}'
        f'<p class="muted">{_text(finding.evidence)}</p>{remedy}</article>'
    )


def _figures(figures: list[Figure]) -> str:
    if not figures:
        why = "The run was too short to draw how it went over time."
        return f'<section><h2>Over time</h2><p class="muted">{why}</p></section>'
    return (
        '<section><h2>Over time</h2><p class="muted small desk">Drag to zoom into a time range, in all figures at '
        "once; double-click to zoom out.</p>"
        f'<div class="figures">{"".join(map(_figure, figures))}</div></section>'
    )


def _figure(figure: Figure) -> str:
    legend = "".join(
        f'<li><span class="chip" style="background:var(--{trace.role})" aria-hidden="true"></span>'
        f"{_text(trace.label)}</li>"
        for trace in figure.traces
    )
    unit = "" if figure.unit in ("", "%") else f' <span class="muted small">{_text(figure.unit)}</span>'
    return (
        f'<figure class="card" id="{figure.name}"><figcaption><h3>{_text(figure.title)}{unit}</h3>'
        f'<ul class="legend">{legend}</ul></figcaption>{_plot(figure)}'
        f'<p class="muted small">{_sentence(figure.description)}</p></figure>'
    )


def _plot(figure: Figure) -> str:
    """Return the drawing: an SVG that is stretched to the room there is, and labels around it that are not."""
    end_s, top = figure.end_s, figure.top
    grid = "".join(f"M0,{value:.5g}H{end_s:.6g}" for value, _ in figure.ticks)
    # A sum of a stack is drawn over those that it contains: the largest first.
    stacked = "".join(_trace(trace) for trace in reversed(figure.traces) if trace.is_stacked)
    lines = "".join(_trace(trace) for trace in figure.traces if not trace.is_stacked)
    values = "".join(
        f'<span style="bottom:{100 * value / top:.2f}%">{_text(label)}</span>' for value, label in figure.ticks
    )
    name, unit_s = time_unit(end_s)
    times = "".join(
        f'<span class="{"end" if at * unit_s > 0.97 * end_s else "" if at else "begin"}" '
        f'style="left:{100 * at * unit_s / end_s:.2f}%">{at:g} {name}</span>'
        for at in round_steps(end_s / unit_s, 6)
    )
    return (
        f'<div class="plot" id="plot-{figure.name}" role="img" '
        f'aria-label="{_text(f"{figure.title}. {figure.description}")}" data-end="{end_s:.6g}" data-top="{top:.5g}" '
        f'data-unit="{_text(figure.unit)}" data-time="{name}" data-second="{unit_s:g}" '
        f'style="height:{figure.height}px"><div class="values">{values}</div><div class="area">'
        f'<svg viewBox="0 0 {end_s:.6g} {top:.5g}" preserveAspectRatio="none" aria-hidden="true">'
        f'<g transform="matrix(1 0 0 -1 0 {top:.5g})"><path class="grid" d="{grid}"/>{stacked}{lines}</g></svg></div>'
        f'<div class="times">{times}</div></div>'
    )


def _trace(trace: Trace) -> str:
    kind = "stacked" if trace.is_stacked else "line dotted" if trace.is_dotted else "line"
    return (
        f'<path class="trace {kind}" style="color:var(--{trace.role})" data-label="{_text(trace.label)}" '
        f'd="{trace.path}"/>'
    )


def _loaders(loaders: tuple[LoaderView, ...]) -> str:
    if not loaders:
        return ""
    shown = "".join(
        f'<div class="card">{_loader(one, is_open=len(loaders) == 1)}</div>' for one in loaders[:_MAX_CARDS]
    )
    rest = ""
    if len(loaders) > _MAX_CARDS:
        rows = [
            (one.name, one.samples, one.rate, percent_text(one.stall_fraction), one.first_batch)
            for one in loaders[_MAX_CARDS:]
        ]
        table = _table(("loader", "samples", "rate", "waited", "first batch"), rows)
        rest = f'<details class="card"><summary>{len(rows)} more loaders</summary>{table}</details>'
    return f"<section><h2>Loaders</h2>{shown}{rest}</section>"


def _loader(loader: LoaderView, *, is_open: bool) -> str:
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in loader.facts)
    numbers = (
        f"{loader.samples} samples in {loader.batches} batches · {loader.rate} · "
        f"waited {percent_text(loader.stall_fraction)} · first batch after {loader.first_batch}"
    )
    waited = f"{min(1.0, max(0.0, loader.stall_fraction)):.4f}"
    return (
        f'<details class="loader"{" open" if is_open else ""}><summary><h3>{_text(loader.name)}</h3>'
        f'<span class="more">settings</span><span class="bar thin" aria-hidden="true">'
        f'<span style="flex:{1 - float(waited):.4f} 1 0;background:var(--step)"></span>'
        f'<span style="flex:{waited} 1 0;min-width:0;background:var(--waiting)"></span></span>'
        f'<span class="numbers">{_sentence(numbers)}</span></summary><dl class="facts">{facts}</dl></details>'
    )


def _machine(machine: tuple[tuple[str, str], ...]) -> str:
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in machine)
    return f'<section><h2>Machine and versions</h2><div class="card"><dl class="facts">{facts}</dl></div></section>'


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    first = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    frame = '<div class="wide" tabindex="0" role="region" aria-label="table">'
    return f"{frame}<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>"


def _script(figures: list[Figure]) -> str:
    """Return the script for zoom and values under the pointer; nothing if there are no figures."""
    if not figures:
        return ""
    text = resources.files("penstock.observe.report").joinpath("page.js").read_text(encoding="utf-8")
    return f"<script>{text}</script>"


def _text(text: str) -> str:
    """Escape a text for elements and attributes; control characters are written out, they are valid in neither."""
    return html.escape(printable(text))


def _sentence(text: str) -> str:
    """Escape a sentence of penstock's own, and keep its figures and their units on one line."""
    whole = re.sub(r"(?<=\d) (?=\d|%|s\b|ms|min|h\b|samples/s|[KMG]iB)", "\N{NO-BREAK SPACE}", text)
    return _text(whole)


def _truncated(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
