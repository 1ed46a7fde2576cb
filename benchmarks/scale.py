"""How many CPU machines a number of GPUs needs, and what the next bottleneck is: formulas, checked on this machine.

    python -m benchmarks.scale [--quick] [--json FILE]     measure: predictions beside measurements; plans
    python -m benchmarks.scale --sample-ms 12 --gpus 64    plan with your figures; measures nothing
    python -m benchmarks.scale --page docs/scale.md        rewrite the page's tables from the files that it names

Measuring: first the machine's costs are measured, each separately. From these costs alone, a formula and a simulation
predict the throughput of twenty-seven configurations. Only then the configurations are run: one round of all, then
another in reverse order. Figures of a plan are assumptions unless they are measured; `--help` lists which.
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

from benchmarks.fresh_process import ROOT
from benchmarks.interleaved import interleave
from benchmarks.machine_facts import facts
from benchmarks.scaling.costs import Costs, ImageCost, WorkerCost
from benchmarks.scaling.fleet import Machines, Plan, Work, plan
from benchmarks.scaling.loop_configs import loop_configs
from benchmarks.scaling.measure import calibrate, predict, time_loop
from benchmarks.scaling.scenarios import EXAMPLE, GPUS, gpu_share, machines_of, scenarios
from benchmarks.scaling.tables import config_text, error_text, machines_text, rate
from benchmarks.table import fill_in_tables
from penstock.core.host import usable_cores
from penstock.core.units import size_text

RESULTS = ROOT / "benchmarks" / "results" / "scale-4core.json"
"""The measured costs that a plan uses: of the loop's thread and of a slot's copy."""


class _Option(NamedTuple):
    """A command-line option that sets a figure of a plan."""

    flag: str
    field: str
    scale: float
    """The factor from the field's unit to the option's unit."""
    description: str


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
    _Option("--fill", "fill", 1, "how busy a CPU machine's cores may be, 0 to 1"),
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
    """Measure, plan, or rewrite the page's tables."""
    machines = machines_of(costs_of(json.loads(RESULTS.read_text()))) if RESULTS.exists() else Machines()
    parser = _parser(machines)
    asked = parser.parse_args()
    if asked.page:
        asked.page.write_text(fill_in_tables(asked.page.read_text(), ROOT))
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
        parser.error("--quick applies to measuring, and a plan measures nothing")
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="only rewrite this page's tables")
    group = parser.add_argument_group("a plan", "with any of these options, only a plan is made")
    group.add_argument("--gpus", type=int, nargs="+", metavar="N", help=f"how many ({' '.join(map(str, GPUS))})")
    for options, default in ((_WORK, EXAMPLE), (_MACHINES, machines)):
        for flag, name, scale, description in options:
            value = getattr(default, name)
            source = "measured" if name in _MEASURED and RESULTS.exists() else "an assumption"
            group.add_argument(
                flag,
                dest=name,
                type=type(value),
                metavar="N" if isinstance(value, int) else "X",
                help=f"{description} ({value * scale:.4g}, {source})",
            )
    group.add_argument("--slow-share", type=float, default=0.0, metavar="X", help="the share of slow samples (0)")
    group.add_argument(
        "--slow-times", type=float, default=10.0, metavar="X", help="how many times as long they take (10)"
    )
    return parser


def _changed(default: Any, options: tuple[_Option, ...], typed: dict[str, Any]) -> Any:
    """Return `default` with the fields set that were given on the command line."""
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
    tried = list(loop_configs(costs.cores, quick=asked.quick))
    seconds, rounds = (0.3, 2) if asked.quick else (1.0, 3)
    predicted = [predict(config, costs, seconds) for config in tried]
    race = interleave(
        {
            str(number): partial(time_loop, config, skip=prediction.skip, batches=prediction.batches)
            for number, (config, prediction) in enumerate(zip(tried, predicted, strict=True))
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
        "measured_s": seconds,
        "machine": facts(),
        "costs": asdict(costs),
        "configs": [
            {
                "config": asdict(config),
                **asdict(prediction),
                "samples_per_s": [config.batch_size * figure for figure in measured[str(number)]],
            }
            for number, (config, prediction) in enumerate(zip(tried, predicted, strict=True))
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
        f"formula {error_text(report, 'formula')}; "
        f"simulation {error_text(report, 'simulated')}; {report['seconds']:.0f} s",
        soft_wrap=True,
    )


def _uneven(machines: Machines) -> Iterator[dict[str, Any]]:
    """Yield the share of time that a GPU computes, by how uneven samples are and how full cores are."""
    for batch_size, step_s in ((EXAMPLE.batch_size, EXAMPLE.step_s), (16, EXAMPLE.step_s / 16)):
        work = replace(EXAMPLE, batch_size=batch_size, step_s=step_s)
        for slow_times in (10.0, 30.0, 100.0):
            for fill in (1.0, 0.9, 0.8, 0.6):
                share = gpu_share(work, replace(machines, fill=fill), slow_share=0.01, slow_times=slow_times)
                yield {"batch_size": batch_size, "slow_times": slow_times, "fill": fill, "gpu_share": share}


def costs_of(report: dict[str, Any]) -> Costs:
    """Return the costs in a report."""
    found = {field.name: report["costs"][field.name] for field in fields(Costs)}
    worker_costs = {shape: WorkerCost(**one) for shape, one in found["worker_costs"].items()}
    return Costs(**{**found, "worker_costs": worker_costs, "image": ImageCost(**found["image"])})


def _print_check(console: Console, report: dict[str, Any]) -> None:
    table = Table(title="predicted, then measured: samples per second", title_justify="left", header_style="bold")
    for head in ("what it shows", "setting", "bound", "formula", "simulation", "measured", "off by"):
        table.add_column(head, justify="right" if head in ("formula", "simulation", "measured", "off by") else "left")
    last = ""
    for config in report["configs"]:
        row = config["config"]["group"]
        found = sorted(config["samples_per_s"])[len(config["samples_per_s"]) // 2]
        if last and row != last:
            table.add_section()
        table.add_row(
            "" if row == last else row,
            config_text(config["config"]),
            config["bound"],
            rate(config["formula"]),
            rate(config["simulated"]),
            rate(found),
            f"{config['formula'] / found - 1:+.0%} {config['simulated'] / found - 1:+.0%}",
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
            f"with {asked.slow_share:.1%} of samples {asked.slow_times:g} times as long as the others, and cores "
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
        ("CPU machines", [f"{machines_text(asdict(found))}, for their {found.machines_for}" for found in plans]),
        ("cores in use", [rate(found.cores) for found in plans]),
        ("batches in flight for a GPU", [rate(found.batches_in_flight) for found in plans]),
        ("slots of a trainer", [size_text(found.slots_nbytes) for found in plans]),
    ]
    for label, cells in rows:
        table.add_row(label, *cells)
    table.add_section()
    for stage in plans[-1].stages:
        cells = []
        for found in plans:
            same = next(one for one in found.stages if one.name == stage.name)
            cells.append(f"{same.share(found.wanted):.1%} (enough: {same.enough(found.wanted):.3g} {same.unit})")
        table.add_row(f"{stage.name}, {stage.given:.3g} {stage.unit}: used", *cells)
    console.print(table)


def _sentence(found: Plan) -> str:
    stage = found.next_stage
    words = f"{found.gpus} GPUs: {found.machines} CPU machines"
    if found.busy_share < 1:
        return f"{words}, and GPUs compute {found.busy_share:.0%} of the time, limited by {stage.name}"
    return f"{words}, next bottleneck: {stage.name} ({stage.share(found.wanted):.0%} used)"


if __name__ == "__main__":
    main()
