"""A report of `benchmarks.scale` as Markdown, one table at a time. Pure data → text.

The tables are named `check`, `costs`, `plans`, `legs` and `uneven`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.figures import Spread
from penstock.core.units import size_text

Cells = Iterable[str]


def scale_table(report: dict[str, Any], name: str) -> str:
    """Return the table `name` of `report`."""
    return _TABLES[name](report)


def errors(report: dict[str, Any], way: str) -> list[float]:
    """Return by what share each point's prediction, "formula" or "simulated", is above what was measured."""
    return [point[way] / statistics.median(point["samples_per_s"]) - 1 for point in report["points"]]


def error_words(report: dict[str, Any], way: str) -> str:
    """Return how far off the predictions are, in words."""
    sizes = sorted(abs(error) for error in errors(report, way))
    return f"{statistics.median(sizes):.0%} in the median, {sizes[-1]:.0%} at most"


def point_words(point: dict[str, Any]) -> str:
    """Return a point's setting.

    >>> point_words({"workers": 1, "batch_size": 4, "sample_s": 0.002, "on_core": True, "step_s": 0.01})
    '1 worker, batches of 4, samples of 2 ms of a core, step 10 ms'
    """
    workers = point["workers"]
    words = [f"{workers} worker{'' if workers == 1 else 's'}", f"batches of {point['batch_size']}"]
    if point["sample_s"]:
        words.append(f"samples of {point['sample_s'] * 1e3:g} ms{' of a core' if point['on_core'] else ''}")
    if point.get("slow_share"):
        words.append(f"{point['slow_share']:.0%} of them {point['slow_times']:g} times that")
    for name, said, scale, unit in (
        ("step_s", "step", 1e3, "ms"),
        ("trip_s", "round trip", 1e3, "ms"),
        ("link_s", "link", 1e3, "ms a sample"),
    ):
        if point.get(name):
            words.append(f"{said} {point[name] * scale:g} {unit}")
    if point.get("shape") == "picture":
        words.append("588 KiB a sample")
    return ", ".join(words)


def markdown(head: Cells, rows: Iterable[Cells]) -> str:
    """Return a Markdown table."""
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def rate(samples_per_s: float) -> str:
    """Return samples per second, as people read them.

    >>> rate(11377.8), rate(53.21)
    ('11 378', '53')
    """
    return f"{samples_per_s:,.0f}".replace(",", " ")


def _made_by(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"`{report['command']}` on {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, "
        f"torch {machine['torch']}, {machine['date']}"
    )


def _check(report: dict[str, Any]) -> str:
    head = ("what it shows", "setting", "bound", "formula", "off by", "simulation", "off by", "measured, samples/s")
    rows, last = [], ""
    for point, formula, simulated in zip(
        report["points"], errors(report, "formula"), errors(report, "simulated"), strict=True
    ):
        found = Spread.of(point["samples_per_s"])
        row = point["point"]["row"]
        rows.append(
            (
                "" if row == last else row,
                point_words(point["point"]),
                point["bound"],
                rate(point["formula"]),
                f"{formula:+.0%}",
                rate(point["simulated"]),
                f"{simulated:+.0%}",
                f"{rate(found.median)} ({rate(found.lowest)} … {rate(found.highest)})",
            )
        )
        last = row
    words = (
        f"{_made_by(report)}; median of {report['rounds']} rounds by turns, with the least and the most. "
        f"Off by: formula {error_words(report, 'formula')}; simulation {error_words(report, 'simulated')}."
    )
    return f"{words}\n\n{markdown(head, rows)}"


def _costs(report: dict[str, Any]) -> str:
    costs = report["costs"]
    rows = [
        ("loop's thread, for a batch", f"{costs['handling_s'] * 1e3:.2f} ms"),
        ("loop's thread, for each further piece of it", f"{costs['report_s'] * 1e3:.2f} ms"),
        ("worker, for a piece of work", f"{costs['making']['small']['piece_s'] * 1e3:.2f} ms"),
        ("worker, to put 12 KiB into a slot", f"{costs['making']['small']['row_s'] * 1e6:.1f} µs"),
        ("worker, to put 588 KiB into a slot", f"{costs['making']['picture']['row_s'] * 1e6:.0f} µs"),
        ("copy into a slot, one thread", f"{costs['copy_gb_per_s']:.1f} GB/s"),
        ("receiving into a slot over local TCP, one thread", f"{costs['receive_gb_per_s']:.1f} GB/s"),
        ("JPEG of 500x375, decode and crop", f"{costs['picture']['decode_s'] * 1e3:.2f} ms of a core"),
        ("the JPEG file", f"{costs['picture']['stored_nbytes']:,}".replace(",", " ") + " bytes"),
        ("a sleep of 2 ms lasts longer by", f"{costs['sleep_extra_s'] * 1e3:.2f} ms"),
    ]
    return f"{_made_by(report)}.\n\n{markdown(('measured', 'figure'), rows)}"


def _plans(report: dict[str, Any]) -> str:
    head = (
        "work",
        "GPUs",
        "wanted, samples/s",
        "CPU machines",
        "for their",
        "GPUs compute",
        "narrowest of the rest",
        "used by what is wanted",
        "enough would be",
        "slots of a trainer",
    )
    rows = [
        (
            scenario["name"] if plan is scenario["plans"][0] else "",
            rate(plan["gpus"]),
            rate(plan["wanted"]),
            machines_words(plan),
            plan["machines_for"],
            f"{plan['fed'] / plan['wanted']:.0%}",
            plan["legs"][0]["name"],
            f"{plan['wanted'] / plan['legs'][0]['samples_per_s']:.0%}",
            enough_words(plan["legs"][0], plan["wanted"]),
            size_text(plan["slots_nbytes"]),
        )
        for scenario in report["scenarios"]
        for plan in scenario["plans"]
    ]
    return markdown(head, rows)


def machines_words(plan: dict[str, Any]) -> str:
    """Return how many CPU machines: for what can be fed, and for all that is wanted where that is more.

    >>> machines_words({"machines": 97, "machines_wanted": 312})
    '97 of 312'
    """
    few, many = plan["machines"], plan["machines_wanted"]
    return rate(few) if few == many else f"{rate(few)} of {rate(many)}"


def enough_words(leg: dict[str, Any], wanted: float) -> str:
    """Return the figure with which a leg would just carry what is wanted.

    >>> leg = {"samples_per_s": 100.0, "given": 25.0, "unit": "Gbit/s", "less_is_more": False}
    >>> enough_words(leg, 218.0)
    '54.5 of 25 Gbit/s'
    """
    share = wanted / leg["samples_per_s"]
    enough = leg["given"] / share if leg["less_is_more"] else leg["given"] * share
    return (
        f"{enough:,.3g} of {leg['given']:.3g} {leg['unit']}"
        if enough < 1000
        else (f"{rate(enough)} of {leg['given']:.3g} {leg['unit']}")
    )


def _legs(report: dict[str, Any]) -> str:
    plans = report["scenarios"][0]["plans"]
    head = ("leg", "given", *(f"{rate(plan['gpus'])} GPUs" for plan in plans))
    rows = []
    for leg in plans[-1]["legs"]:
        shares = []
        for plan in plans:
            same = next(one for one in plan["legs"] if one["name"] == leg["name"])
            shares.append(f"{plan['wanted'] / same['samples_per_s']:.1%}")
        rows.append((leg["name"], f"{leg['given']:.3g} {leg['unit']}", *shares))
    return markdown(head, rows)


def _uneven(report: dict[str, Any]) -> str:
    fills = list(dict.fromkeys(row["fill"] for row in report["uneven"]))
    kinds = list(dict.fromkeys((row["batch_size"], row["slow_times"]) for row in report["uneven"]))
    found = {(row["batch_size"], row["slow_times"], row["fill"]): row["gpu_share"] for row in report["uneven"]}
    head = ("batch", "1 % of samples", *(f"cores {fill:.0%} full" for fill in fills))
    rows = [
        (
            str(batch_size),
            f"{slow_times:g} times as dear",
            *(f"{found[batch_size, slow_times, fill]:.1%}" for fill in fills),
        )
        for batch_size, slow_times in kinds
    ]
    return markdown(head, rows)


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "check": _check,
    "costs": _costs,
    "plans": _plans,
    "legs": _legs,
    "uneven": _uneven,
}
