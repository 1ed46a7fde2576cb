"""Format results as tables: for a terminal, and as Markdown. Pure data → text.

`python -m benchmarks.table FILE.json ...` prints the tables. `python -m benchmarks.table --page docs/data.md` replaces
the text between each marker that names a file, such as `<!-- bench: benchmarks/results/loader-2core.json -->`, and the
next `<!-- bench:end -->` with the table of that file. For a report with several tables, the marker also names the
table: `<!-- bench: benchmarks/results/everyday-2core.json workers -->`. A marker may instead name the folder of
`benchmarks.gpu` and a section of `gpu_tables`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import gpu_tables
from benchmarks.benchmark_result import OURS, Result, Spread, Target
from benchmarks.machine_facts import PEER_PACKAGES
from penstock.core.units import size_text
from penstock.tune.setting import Setting

SETTINGS = [one.name for one in fields(Setting)]
"""What a row of the tuner's benchmark needs; older ones have more."""

MARKDOWN_COLUMNS = 7  # targets and verdicts are for the terminal
HEADINGS = ("measured", "unit", "penstock", "against", "its figure", "ratio", "min … max", "target", "")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison, formatted."""

    cells: tuple[str, ...]
    reached: bool | None
    """None where there is no target."""


def lines(results: list[Result]) -> Iterator[Line]:
    """Yield a line for every pair of a result and a loader that it is compared with."""
    for result in results:
        mine = Spread.of(result.figures[OURS]).median if result.figures else None
        for number, (other, ratios) in enumerate(result.ratios.items()):
            ratio = Spread.of(ratios)
            target = result.target(other)
            reached = target.reached(ratio.median) if target else None
            theirs = Spread.of(result.figures[other]).median if result.figures else None
            first = (result.name, result.unit, number_text(mine)) if number == 0 else ("", "", "")
            yield Line(
                cells=(
                    *first,
                    other,
                    number_text(theirs),
                    f"{ratio.median:.2f}",
                    f"{ratio.lowest:.2f} … {ratio.highest:.2f}",
                    str(target) if target else "",
                    _verdict(reached),
                ),
                reached=reached,
            )


def terminal_table(results: list[Result]) -> Table:
    """Return a rich table of `results`."""
    table = Table(title="penstock beside torch's DataLoader", title_justify="left", header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in HEADINGS[2:3] + HEADINGS[4:8] else "left")
    case = None
    owners = [result for result in results for _ in result.ratios]
    for result, line in zip(owners, lines(results), strict=True):
        if case not in (None, result.case):
            table.add_section()
        case = result.case
        *cells, verdict = line.cells
        style = {True: "green", False: "red", None: "dim"}[line.reached]
        table.add_row(*cells, f"[{style}]{verdict}[/]")
    return table


def markdown_table(report: dict[str, Any], name: str = "check") -> str:
    """Return a report that a benchmark wrote with `--json` as a Markdown table, under its command and machine.

    For a report with several tables, `name` selects one.
    """
    if report.get("benchmark") == "everyday":
        return _everyday_table(report, name)
    if name == "peers":
        return _peers_table(report)
    if name == "threads":
        return _threads_table(report)
    if name == "peers_means":
        return _peers_means_table(report)
    kinds = {
        "articles": _articles_table,
        "fit": _fit_table,
        "plan_peers": _plan_peers_table,
        "readers": _readers_table,
        "tune": _tune_table,
    }
    return kinds.get(report.get("benchmark", ""), _loader_table)(report)


def fill_in_tables(text: str, folder: Path) -> str:
    """Return `text` with every marked table replaced by that of its file, which is looked up relative to `folder`."""

    def table(marker: re.Match[str]) -> str:
        file, name = folder / marker["file"], marker["name"]
        if file.suffix == ".json":
            content = markdown_table(json.loads(file.read_text()), *filter(None, [name]))
        else:
            content = gpu_tables.section(file, name)
        return f"{marker['head']}\n{content}\n<!-- bench:end -->"

    head = r"(?P<head><!-- bench: (?P<file>\S+)( (?P<name>\w+))? -->)"
    return re.sub(head + r"\n.*?<!-- bench:end -->", table, text, flags=re.DOTALL)


def _articles_table(report: dict[str, Any]) -> str:
    machine, load = report["machine"], report["load"]
    lines = [
        f"`{report['command']}` on {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['date']}; other programs ran (load average {load['before'][0]:.1f} before, "
        f"{load['after'][0]:.1f} after). Medians of {len(report['rows'][0]['speed'])} interleaved rounds (least … "
        "most).",
        "",
        "| loop | setting | samples/s | times as fast | CPU, ms per sample |",
        "| --- | --- | --- | --- | --- |",
    ]
    shown = ""
    for row in report["rows"]:
        loop, shown = "" if row["loop"] == shown else row["loop"], row["loop"]
        rate = number_text(Spread.of(row["samples_per_s"]).median)
        cells = (loop, f"`{row['setting']}`" if "=" in row["setting"] else row["setting"], rate)
        lines.append(f"| {' | '.join(cells)} | {_range(row['speed'], 2)} | {_range(row['cpu_ms_per_sample'], 3)} |")
    return "\n".join(lines)


def _everyday_table(report: dict[str, Any], name: str) -> str:
    """Return the loops' ratios: `inline` and `workers` name those without and with workers, any other name both."""
    machine = report["machine"]
    rows: dict[str, dict[str, dict[str, str]]] = {}
    for result in map(Result.from_json, report["results"]):
        loop, _, workers = result.name.rpartition(", ")
        if name not in ("inline", "workers") or (workers == "inline") == (name == "inline"):
            rows.setdefault(loop, {}).setdefault(workers, {})[result.unit] = _range(result.ratios["torch"], 2)
    workers = list(dict.fromkeys(number for row in rows.values() for number in row))
    heads = [f"{number}, {unit}" for number in workers for unit in ("wall", "CPU")]
    lines = [
        f"`{report['command']}` on {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['date']}. Torch's time divided by penstock's, median of interleaved rounds "
        "(least … most): above 1, penstock is faster.",
        "",
        f"| loop | {' | '.join(heads)} |",
        f"| --- |{' --- |' * len(heads)}",
    ]
    for loop, row in rows.items():
        found = (row.get(number, {}) for number in workers)
        cells = [one.get(unit, "") for one in found for unit in ("samples/s", "samples/CPU s")]
        lines.append(f"| {loop} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _fit_table(report: dict[str, Any]) -> str:
    lines = [
        "| model | optimizer | a step by hand | TrainStep, in CPU time | target | by hand again | TrainStep, in time |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in report["overhead"]:
        cpu, seconds = row["of_cpu_s"], row["of_seconds"]
        found = (cpu["TrainStep"], cpu["by hand again"], seconds["TrainStep"])
        cells = [f"{one['ratio']:.4f} ({one['low']:.4f} … {one['high']:.4f})" for one in found]
        cells.insert(1, f"{row['target']:.2f}" if "target" in row else "")
        lines.append(f"| {row['name']} | {row['optimizer']} | {row['ms']['by hand']:.1f} ms | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plan_peers_table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    others = ("Accelerate", "DeepSpeed", "MemTracker")
    versions = ", ".join(f"{name} {machine[name]}" for name in ("transformers", "accelerate", "deepspeed"))
    lines = [
        f"`python -m benchmarks.plan_peers`, torch {machine['torch']}, {versions}, {machine['date']}:",
        "",
        "| model | counted | `penstock.plan` | what `fits` takes | Accelerate | DeepSpeed | torch's MemTracker |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["models"]:
        found = [estimate_text(row["estimates"][one], row["counted"]) for one in ("penstock", "penstock fits", *others)]
        lines.append(f"| {row['name']} | {size_text(row['counted'])} | {' | '.join(found)} |")
    return "\n".join(lines)


def estimate_text(estimate: int | None, truth: int) -> str:
    """Return how far an estimate is off.

    >>> estimate_text(150, 100), estimate_text(None, 100)
    ('+50.0 %', 'fails')
    """
    return "fails" if estimate is None else f"{100 * (estimate / truth - 1):+.1f} %"


def _readers_table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"`{report['command']}` on {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, "
        f"{machine['date']}, beside other programs (load average {report['load']:.1f}). Median of interleaved rounds "
        "(least … most): above 1, penstock is faster.",
        "",
        "| reader | beside | of its speed (least … most) | penstock | unit |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in map(Result.from_json, report["results"]):
        mine = number_text(Spread.of(result.figures[OURS]).median)
        for other, ratios in result.ratios.items():
            lines.append(f"| {result.name} | {other} | {_range(ratios, 2)} | {mine} | {result.unit} |")
    return "\n".join(lines)


def _tune_table(report: dict[str, Any]) -> str:
    lines = ["| loop | `penstock tune` chose | the grid's best | of its speed (least … most) | of the grid's time |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in report["rows"]:
        usual, choice = ", prefetch 2", row["tuned"]["choice"]
        chose, best = (
            Setting(**{name: choice[name] for name in SETTINGS}).describe().removesuffix(usual),
            row["against"].removesuffix(usual),
        )
        is_same = chose == best
        capped = row["ram_nbytes"] is not None
        cells = (
            f"{row['name']}, {size_text(row['ram_nbytes'])}" if capped else row["name"],
            f"{chose}, {size_text(row['choice_nbytes'])}" if capped else chose,
            "the same" if is_same else best,
            "1" if is_same else _range(row["of_best"], 3),
            f"{row['tuner_s'] / row['grid_s']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _threads_table(report: dict[str, Any]) -> str:
    """Return the best of a grid's processes and of its threads, loop by loop."""
    lines = ["| loop | best with processes | best with threads | threads ÷ processes |", "| --- | --- | --- | --- |"]
    for row in report["rows"]:
        best: dict[str, tuple[float, int]] = {"process": (0.0, 0), "thread": (0.0, 0)}
        for trial in row["grid"]:
            setting = trial["setting"]
            if setting["workers"]:
                kind = setting["worker_type"]
                best[kind] = max(best[kind], (trial["samples_per_s"], setting["workers"]))
        cells = (f"{number_text(speed)} samples/s with {workers}" for speed, workers in best.values())
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {best['thread'][0] / best['process'][0]:.2f} |")
    return "\n".join(lines)


def _range(values: list[float], digits: int) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.{digits}f} ({spread.lowest:.{digits}f} … {spread.highest:.{digits}f})"


def _peers_table(report: dict[str, Any]) -> str:
    """Return a row for each other loader and a column for each workload."""
    machine, results = report["machine"], [Result.from_json(result) for result in report["results"]]
    others = list(dict.fromkeys(other for result in results for other in result.ratios))
    names = list(dict.fromkeys(result.name for result in results if result.unit))
    versions = ", ".join(f"{name} {machine[name]}" for name in PEER_PACKAGES if name in machine)
    lines = [
        f"`python -m benchmarks.loader --quick --peers`, {machine['cores']} cores of {machine['cpu']}, Python "
        f"{machine['python']}, torch {machine['torch']}, {versions}, {machine['date']}, beside other programs (load "
        f"average {report['load'][1]:.0f}). Penstock's samples/s divided by the other's, median of interleaved rounds "
        "(least … most), then the same for samples per second of CPU time: above 1, penstock is ahead.",
        "",
        f"| beside | {' | '.join(names)} |",
        f"| --- |{' --- |' * len(names)}",
    ]
    for other in others:
        found = {(one.name, one.unit): one.ratios[other] for one in results if other in one.ratios}
        cells = []
        for name in names:
            wall, cpu = (found.get((name, unit)) for unit in ("samples/s", "samples/CPU s"))
            cells.append((_range(wall, 2) if wall else "") + (f"; {Spread.of(cpu).median:.2f}" if cpu else ""))
        lines.append(f"| {other} | {' | '.join(cells)} |")
    notes = [f"- {result.name}: {note}" for result in results for note in result.notes]
    absent = [f"- {name}: {reason}" for name, reason in report["absent"].items()]
    return "\n".join([*lines, *([""] if notes or absent else []), *notes, *absent])


def _peers_means_table(report: dict[str, Any]) -> str:
    """Return a row for each other loader: the geometric means over workloads that move batches between processes."""
    means = [one for one in map(Result.from_json, report["results"]) if not one.unit]
    others = list(dict.fromkeys(other for result in means for other in result.ratios))
    heads = ["penstock ÷", *(one.name.partition(":")[0] for one in means)]
    rows = (
        [other, *(_range(one.ratios[other], 2) if other in one.ratios else "" for one in means)] for other in others
    )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _loader_table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    results = [Result.from_json(result) for result in report["results"]]
    origin = (
        f"`{report['command']}` on {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, torch {machine['torch']}, {machine['date']}. Median of {report['repeats']} "
        "interleaved repeats; the ratio is penstock's figure divided by the other's, round by round."
    )
    columns = slice(MARKDOWN_COLUMNS)
    rows = [HEADINGS[columns], ("---",) * MARKDOWN_COLUMNS, *(line.cells[columns] for line in lines(results))]
    notes = [f"- {result.name}: {note}" for result in results for note in result.notes]
    return "\n".join([origin, "", *(f"| {' | '.join(cells)} |" for cells in rows), *([""] if notes else []), *notes])


def summary(results: list[Result], seconds: float) -> str:
    """Return one line: the number of targets reached, and those that were not."""
    missed = []
    count = 0
    for result in results:
        for target, reached in zip(result.targets, result.verdicts(), strict=True):
            count += 1
            if not reached:
                missed.append(_missed(result, target))
    duration = f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
    rest = f"; not reached: {', '.join(missed)}" if missed else ""
    return f"loader: {count - len(missed)} of {count} targets reached in {duration}{rest}"


def number_text(value: float | None) -> str:
    """Return `value` with three significant digits, or with all integer digits.

    >>> number_text(26_214.4), number_text(0.01234), number_text(None)
    ('26 214', '0.0123', '')
    """
    if value is None:
        return ""
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def _verdict(reached: bool | None) -> str:
    return {True: "reached", False: "not reached", None: ""}[reached]


def _missed(result: Result, target: Target) -> str:
    return f"{result.name} ({Spread.of(result.ratios[target.against]).median:.2f}, {target} {target.against})"


def main() -> None:
    """Print the Markdown table of each file given, or fill in the tables of a page."""
    if sys.argv[1:2] == ["--page"]:
        for page in map(Path, sys.argv[2:]):
            page.write_text(fill_in_tables(page.read_text(), page.parent))
        return
    for name in sys.argv[1:]:
        print(markdown_table(json.loads(Path(name).read_text())), end="\n\n")


if __name__ == "__main__":
    main()
