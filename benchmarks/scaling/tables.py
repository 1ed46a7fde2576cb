"""A report of `benchmarks.scale` as Markdown, one table at a time. Pure data → text.

The tables are named `check`, `costs`, `plans`, `stages` and `uneven`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.benchmark_result import Spread
from penstock.core.units import size_text

Cells = Iterable[str]


def scale_table(report: dict[str, Any], name: str) -> str:
    """Return the table `name` of `report`."""
    return _TABLES[name](report)


def errors(report: dict[str, Any], method: str) -> list[float]:
    """Return the relative error of each prediction, "formula" or "simulated", against the measurement."""
    return [config[method] / statistics.median(config["samples_per_s"]) - 1 for config in report["configs"]]


def error_text(report: dict[str, Any], method: str) -> str:
    """Return the size of the errors, as text."""
    sizes = sorted(abs(error) for error in errors(report, method))
    return f"{statistics.median(sizes):.0%} in the median, {sizes[-1]:.0%} at most"


def config_text(config: dict[str, Any]) -> str:
    """Return a configuration's settings as text.

    >>> config_text({"workers": 1, "batch_size": 4, "sample_s": 0.002, "on_core": True, "step_s": 0.01})
    '1 worker, batches of 4, samples of 2 ms of a core, step 10 ms'
    """
    workers = config["workers"]
    words = [f"{workers} worker{'' if workers == 1 else 's'}", f"batches of {config['batch_size']}"]
    if config["sample_s"]:
        words.append(f"samples of {config['sample_s'] * 1e3:g} ms{' of a core' if config['on_core'] else ''}")
    if config.get("slow_share"):
        words.append(f"{config['slow_share']:.0%} of them {config['slow_times']:g} times that")
    for name, label, scale, unit in (
        ("step_s", "step", 1e3, "ms"),
        ("round_trip_s", "round trip", 1e3, "ms"),
        ("link_s", "link", 1e3, "ms a sample"),
    ):
        if config.get(name):
            words.append(f"{label} {config[name] * scale:g} {unit}")
    if config.get("shape") == "image":
        words.append("588 KiB a sample")
    return ", ".join(words)


def markdown(head: Cells, rows: Iterable[Cells]) -> str:
    """Return a Markdown table."""
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def rate(samples_per_s: float) -> str:
    """Format samples per second.

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
    for config, formula, simulated in zip(
        report["configs"], errors(report, "formula"), errors(report, "simulated"), strict=True
    ):
        found = Spread.of(config["samples_per_s"])
        row = config["config"]["group"]
        rows.append(
            (
                "" if row == last else row,
                config_text(config["config"]),
                config["bound"],
                rate(config["formula"]),
                f"{formula:+.0%}",
                rate(config["simulated"]),
                f"{simulated:+.0%}",
                f"{rate(found.median)} ({rate(found.lowest)} … {rate(found.highest)})",
            )
        )
        last = row
    words = (
        f"{_made_by(report)}; median of {report['rounds']} interleaved rounds, with the lowest and the highest. "
        f"Off by: formula {error_text(report, 'formula')}; simulation {error_text(report, 'simulated')}."
    )
    return f"{words}\n\n{markdown(head, rows)}"


def _costs(report: dict[str, Any]) -> str:
    costs = report["costs"]
    rows = [
        ("loop's thread, for a batch", f"{costs['handling_s'] * 1e3:.2f} ms"),
        ("loop's thread, for each further task of it", f"{costs['result_s'] * 1e3:.2f} ms"),
        ("worker, for a task", f"{costs['worker_costs']['small']['task_s'] * 1e3:.2f} ms"),
        ("worker, to put 12 KiB into a slot", f"{costs['worker_costs']['small']['row_s'] * 1e6:.1f} µs"),
        ("worker, to put 588 KiB into a slot", f"{costs['worker_costs']['image']['row_s'] * 1e6:.0f} µs"),
        ("copy into a slot, one thread", f"{costs['copy_gb_per_s']:.1f} GB/s"),
        ("receiving into a slot over local TCP, one thread", f"{costs['receive_gb_per_s']:.1f} GB/s"),
        ("JPEG of 500x375, decode and crop", f"{costs['image']['decode_s'] * 1e3:.2f} ms of a core"),
        ("the JPEG file", f"{costs['image']['stored_nbytes']:,}".replace(",", " ") + " bytes"),
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
        "bottleneck of the rest",
        "used by what is wanted",
        "enough would be",
        "slots of a trainer",
    )
    rows = [
        (
            scenario["name"] if plan is scenario["plans"][0] else "",
            rate(plan["gpus"]),
            rate(plan["wanted"]),
            machines_text(plan),
            plan["machines_for"],
            f"{plan['fed'] / plan['wanted']:.0%}",
            plan["stages"][0]["name"],
            f"{plan['wanted'] / plan['stages'][0]['samples_per_s']:.0%}",
            enough_text(plan["stages"][0], plan["wanted"]),
            size_text(plan["slots_nbytes"]),
        )
        for scenario in report["scenarios"]
        for plan in scenario["plans"]
    ]
    return markdown(head, rows)


def machines_text(plan: dict[str, Any]) -> str:
    """Return the number of CPU machines: for what can be fed, and for all that is wanted where that is more.

    >>> machines_text({"machines": 97, "machines_wanted": 312})
    '97 of 312'
    """
    few, many = plan["machines"], plan["machines_wanted"]
    return rate(few) if few == many else f"{rate(few)} of {rate(many)}"


def enough_text(stage: dict[str, Any], wanted: float) -> str:
    """Return the figure with which a stage would just carry the samples wanted.

    >>> stage = {"samples_per_s": 100.0, "given": 25.0, "unit": "Gbit/s", "less_is_more": False}
    >>> enough_text(stage, 218.0)
    '54.5 of 25 Gbit/s'
    """
    share = wanted / stage["samples_per_s"]
    enough = stage["given"] / share if stage["less_is_more"] else stage["given"] * share
    return (
        f"{enough:,.3g} of {stage['given']:.3g} {stage['unit']}"
        if enough < 1000
        else (f"{rate(enough)} of {stage['given']:.3g} {stage['unit']}")
    )


def _stages(report: dict[str, Any]) -> str:
    plans = report["scenarios"][0]["plans"]
    head = ("stage", "given", *(f"{rate(plan['gpus'])} GPUs" for plan in plans))
    rows = []
    for stage in plans[-1]["stages"]:
        shares = []
        for plan in plans:
            same = next(one for one in plan["stages"] if one["name"] == stage["name"])
            shares.append(f"{plan['wanted'] / same['samples_per_s']:.1%}")
        rows.append((stage["name"], f"{stage['given']:.3g} {stage['unit']}", *shares))
    return markdown(head, rows)


def _uneven(report: dict[str, Any]) -> str:
    fills = list(dict.fromkeys(row["fill"] for row in report["uneven"]))
    kinds = list(dict.fromkeys((row["batch_size"], row["slow_times"]) for row in report["uneven"]))
    found = {(row["batch_size"], row["slow_times"], row["fill"]): row["gpu_share"] for row in report["uneven"]}
    head = ("batch", "1 % of samples", *(f"cores {fill:.0%} full" for fill in fills))
    rows = [
        (
            str(batch_size),
            f"{slow_times:g} times as long",
            *(f"{found[batch_size, slow_times, fill]:.1%}" for fill in fills),
        )
        for batch_size, slow_times in kinds
    ]
    return markdown(head, rows)


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "check": _check,
    "costs": _costs,
    "plans": _plans,
    "stages": _stages,
    "uneven": _uneven,
}
