"""How many CPU machines feed so many GPUs, and what is in the way next: formulas, checked against this machine.

    python -m benchmarks.scale [--quick] [--json FILE]     measure: predicted beside measured; plans
    python -m benchmarks.scale --sample-ms 12 --gpus 64    plan: with your figures; measures nothing
    python -m benchmarks.scale --page docs/scale.md        write the page's tables anew, from the files that it names

Measuring: what the machine's parts cost is measured first, each by itself. From these costs alone the throughput of
twenty-seven configurations is predicted, by a formula and by a simulation, and only then are they run: a round of all,
then another in the reverse order. Figures of a plan are assumptions unless they are measured; `--help` says which.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fresh import ROOT
from benchmarks.machine import facts
from benchmarks.race import interleave
from benchmarks.scaling.costs import Costs, Making, Picture
from benchmarks.scaling.fleet import Machines, Plan, Work, plan
from benchmarks.scaling.laps import calibrate, lap, predict
from benchmarks.scaling.points import points
from benchmarks.scaling.scenarios import EXAMPLE, GPUS, gpu_share, machines_of, scenarios
from benchmarks.scaling.tables import error_words, machines_words, point_words, rate
from benchmarks.table import filled_in
from penstock.core.host import usable_cores
from penstock.core.units import size_text

RESULTS = ROOT / "benchmarks" / "results" / "scale-4core.json"
"""Where a plan finds what was measured: the costs of the loop's thread and of a slot's copy."""


class _Option(NamedTuple):
    """A figure of a plan on the command line."""

    flag: str
    field: str
    scale: float
    """Of the field, to what is typed."""
    words: str


_WORK = (
    _Option("--sample-ms", "sample_s", 1e3, "one core's time to make a sample, ms"),
    _Option("--sample-bytes", "sample_nbytes", 1, "of a sample as it travels and lies in a slot"),
    _Option("--stored-bytes", "stored_nbytes", 1, "of a sample as the store keeps it"),
    _Option("--batch", "batch_size", 1, "samples, for one GPU"),
    _Option("--step-ms", "step_s", 1e3, "of one GPU, when its data is there"),
    _Option("--host-ms", "host_s", 1e3, "the part of a step in which the loop's thread is busy"),
)
_MACHINES = (
    _Option("--gpus-per-trainer", "gpus_per_trainer", 1, "GPUs in a training machine"),
    _Option("--cores-per-machine", "cores_per_machine", 1, "of a CPU machine"),
    _Option("--fill", "fill", 1, "how busy a CPU machine may be, 0 to 1"),
    _Option("--gbit", "gbit", 1, "a CPU machine's link, each way"),
    _Option("--trainer-gbit", "trainer_gbit", 1, "what a trainer's link has for data"),
    _Option("--latency-ms", "latency_s", 1e3, "a round trip between the two"),
    _Option("--storage-gbit", "storage_gbit", 1, "what the store gives to all together"),
    _Option("--memory-gb", "memory_gb_per_s", 1, "GB/s of a trainer's memory"),
    _Option("--memory-passes", "memory_passes", 1, "how often a byte passes that memory"),
    _Option("--device-gb", "device_gb_per_s", 1, "GB/s from a trainer's memory to one GPU"),
    _Option("--copy-gb", "copy_gb_per_s", 1, "GB/s of one thread into a slot"),
    _Option("--handling-ms", "handling_s", 1e3, "the loop's thread, for a batch"),
)
_MEASURED = ("copy_gb_per_s", "handling_s")


def main() -> None:
    """Measure, or plan, or write the page's tables."""
    machines = machines_of(costs_of(json.loads(RESULTS.read_text()))) if RESULTS.exists() else Machines()
    parser = _parser(machines)
    asked = parser.parse_args()
    if asked.page:
        asked.page.write_text(filled_in(asked.page.read_text(), ROOT))
        return
    typed = {
        option.field: getattr(asked, option.field)
        for option in (*_WORK, *_MACHINES)
        if getattr(asked, option.field) is not None
    }
    if not typed and asked.gpus is None and not asked.slow_share:
        _measure(asked)
        return
    if asked.quick:
        parser.error("--quick is about measuring, and a plan measures nothing")
    try:
        _plan(asked, _changed(EXAMPLE, _WORK, typed), _changed(machines, _MACHINES, typed))
    except ValueError as error:
        parser.error(str(error))


def _parser(machines: Machines) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer workers, shorter: a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write this page's tables anew; nothing else happens")
    group = parser.add_argument_group("a plan", "any of these, and only a plan is made")
    group.add_argument("--gpus", type=int, nargs="+", metavar="N", help=f"how many ({' '.join(map(str, GPUS))})")
    for options, default in ((_WORK, EXAMPLE), (_MACHINES, machines)):
        for flag, name, scale, words in options:
            value = getattr(default, name)
            source = "measured" if name in _MEASURED and RESULTS.exists() else "an assumption"
            group.add_argument(
                flag,
                dest=name,
                type=type(value),
                metavar="N" if isinstance(value, int) else "X",
                help=f"{words} ({value * scale:.4g}, {source})",
            )
    group.add_argument("--slow-share", type=float, default=0.0, metavar="X", help="the share of slow samples (0)")
    group.add_argument("--slow-times", type=float, default=10.0, metavar="X", help="how many times as dear (10)")
    return parser


def _changed(default: Any, options: tuple[_Option, ...], typed: dict[str, Any]) -> Any:
    """Return `default` with what was typed for it."""
    new = {}
    for option in options:
        if option.field in typed:
            value = typed[option.field]
            new[option.field] = value if isinstance(value, int) else value / option.scale
    return replace(default, **new)


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────


def _measure(asked: argparse.Namespace) -> None:
    console, progress = Console(width=None if sys.stdout.isatty() else 150), Console(stderr=True)
    torch.set_num_threads(1)
    began = time.perf_counter()
    costs = calibrate(usable_cores())
    progress.print(f"costs: {time.perf_counter() - began:.0f} s", style="dim")
    tried = list(points(costs.cores, quick=asked.quick))
    seconds, rounds = (0.3, 2) if asked.quick else (1.0, 3)
    predicted = [predict(point, costs, seconds) for point in tried]
    race = interleave(
        {
            str(number): partial(lap, point, skip=told.skip, batches=told.batches)
            for number, (point, told) in enumerate(zip(tried, predicted, strict=True))
        },
        rounds,
    )
    measured = race.figures(lambda one: 1 / one.batch_s)
    machines = machines_of(costs)
    report: dict[str, Any] = {
        "benchmark": "scale",
        "command": shlex.join(["python", "-m", "benchmarks.scale", *(["--quick"] if asked.quick else [])]),
        "quick": asked.quick,
        "rounds": rounds,
        "lap_s": seconds,
        "machine": facts(),
        "costs": asdict(costs),
        "points": [
            {
                "point": asdict(point),
                **asdict(told),
                "samples_per_s": [point.batch_size * figure for figure in measured[str(number)]],
            }
            for number, (point, told) in enumerate(zip(tried, predicted, strict=True))
        ],
        "assumed": asdict(machines),
        "scenarios": [
            {**asdict(one), "plans": [asdict(plan(one.work, machines, gpus)) for gpus in GPUS]}
            for one in scenarios(costs)
        ],
        "uneven": list(_uneven(machines)),
    }
    report["seconds"] = round(time.perf_counter() - began, 1)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    _print_check(console, report)
    for scenario in scenarios(costs):
        _print_plan(console, scenario.name, [plan(scenario.work, machines, gpus) for gpus in GPUS])
    console.print(
        f"scale: {len(tried)} configurations predicted, then measured; off by: "
        f"formula {error_words(report, 'formula')}; "
        f"simulation {error_words(report, 'simulated')}; {report['seconds']:.0f} s",
        soft_wrap=True,
    )


def _uneven(machines: Machines) -> Iterator[dict[str, Any]]:
    """Yield how much of its time a GPU computes, by how uneven samples are, and how full cores are."""
    for batch_size, step_s in ((EXAMPLE.batch_size, EXAMPLE.step_s), (16, EXAMPLE.step_s / 16)):
        work = replace(EXAMPLE, batch_size=batch_size, step_s=step_s)
        for slow_times in (10.0, 30.0, 100.0):
            for fill in (1.0, 0.9, 0.8, 0.6):
                share = gpu_share(work, replace(machines, fill=fill), slow_share=0.01, slow_times=slow_times)
                yield {"batch_size": batch_size, "slow_times": slow_times, "fill": fill, "gpu_share": share}


def costs_of(report: dict[str, Any]) -> Costs:
    """Return the costs of a report."""
    found = {field.name: report["costs"][field.name] for field in fields(Costs)}
    making = {shape: Making(**one) for shape, one in found["making"].items()}
    return Costs(**{**found, "making": making, "picture": Picture(**found["picture"])})


def _print_check(console: Console, report: dict[str, Any]) -> None:
    table = Table(title="predicted, then measured: samples per second", title_justify="left", header_style="bold")
    for head in ("what it shows", "setting", "bound", "formula", "simulation", "measured", "off by"):
        table.add_column(head, justify="right" if head in ("formula", "simulation", "measured", "off by") else "left")
    last = ""
    for point in report["points"]:
        row = point["point"]["row"]
        found = sorted(point["samples_per_s"])[len(point["samples_per_s"]) // 2]
        if last and row != last:
            table.add_section()
        table.add_row(
            "" if row == last else row,
            point_words(point["point"]),
            point["bound"],
            rate(point["formula"]),
            rate(point["simulated"]),
            rate(found),
            f"{point['formula'] / found - 1:+.0%} {point['simulated'] / found - 1:+.0%}",
        )
        last = row
    console.print(table)


# ── planning ────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(asked: argparse.Namespace, work: Work, machines: Machines) -> None:
    plans = [plan(work, machines, gpus) for gpus in asked.gpus or GPUS]
    uneven = (
        gpu_share(work, machines, slow_share=asked.slow_share, slow_times=asked.slow_times)
        if asked.slow_share
        else None
    )
    if asked.json:
        found = {
            "work": asdict(work),
            "machines": asdict(machines),
            "plans": list(map(asdict, plans)),
            "uneven": uneven,
        }
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    _print_plan(Console(width=None if sys.stdout.isatty() else 150), "plan", plans)
    if uneven is not None:
        print(
            f"with {asked.slow_share:.1%} of samples {asked.slow_times:g} times as dear as the others, and cores "
            f"{machines.fill:.0%} full, a GPU computes {uneven:.1%} of its time (simulated)"
        )
    print("scale: " + "; ".join(map(_sentence, plans)))


def _print_plan(console: Console, title: str, plans: list[Plan]) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("")
    for found in plans:
        table.add_column(f"{rate(found.gpus)} GPUs", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("trainers", [rate(found.trainers) for found in plans]),
        ("samples/s wanted", [rate(found.wanted) for found in plans]),
        ("samples/s fed", [rate(found.fed) for found in plans]),
        ("GPUs compute", [f"{found.busy_share:.0%}" for found in plans]),
        ("CPU machines", [f"{machines_words(asdict(found))}, for their {found.machines_for}" for found in plans]),
        ("cores that work", [rate(found.cores) for found in plans]),
        ("batches under way for a GPU", [rate(found.batches_under_way) for found in plans]),
        ("slots of a trainer", [size_text(found.slots_nbytes) for found in plans]),
    ]
    for label, cells in rows:
        table.add_row(label, *cells)
    table.add_section()
    for leg in plans[-1].legs:
        cells = []
        for found in plans:
            same = next(one for one in found.legs if one.name == leg.name)
            cells.append(f"{same.share(found.wanted):.1%} (enough: {same.enough(found.wanted):.3g} {same.unit})")
        table.add_row(f"{leg.name}, {leg.given:.3g} {leg.unit}: used", *cells)
    console.print(table)


def _sentence(found: Plan) -> str:
    leg = found.next_leg
    words = f"{found.gpus} GPUs: {found.machines} CPU machines"
    if found.busy_share < 1:
        return f"{words}, and GPUs compute {found.busy_share:.0%} of the time, for want of {leg.name}"
    return f"{words}, next in the way: {leg.name} ({leg.share(found.wanted):.0%} used)"


if __name__ == "__main__":
    main()
