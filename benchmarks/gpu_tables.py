"""What `benchmarks.gpu` found, as Markdown for the pages: a marker names the folder of results and a section.

A section whose results are not there says so. `make gpu` fills in all pages, through `benchmarks.table --page`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.benchmark_result import Spread
from benchmarks.row_file import measured
from penstock.core.units import size_text

Reports = dict[str, dict[str, Any]]
Row = dict[str, Any]
NOT_YET = "Not measured yet (`make gpu`)."
NEVER = "No GPU has run this code yet"
RESIDENT, TORCH, PINNED, AHEAD = (
    "resident", "torch, pin_memory, non_blocking", "penstock, pin_memory, non_blocking", "penstock, device="
)  # fmt: skip
SHORTEST_MS = 2.5
"""Shorter steps have no target of their own: the host cannot give them to the GPU in time."""


def section(folder: Path, name: str) -> str:
    """Return a section of the results in `folder`.

    Raises:
        KeyError: there is no such section.
    """
    reports = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    for report in reports.values():
        report.update({rows: measured(value) for rows, value in report.items()})
    return SECTIONS[name](reports)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *escaped))


def _spread(values: list[float], digits: int) -> str:
    one = Spread.of(values)
    return f"{one.median:.{digits}f} ({one.lowest:.{digits}f} … {one.highest:.{digits}f})"


def _origin(report: Row) -> str:
    found = report["machine"]
    sizes = "" if report["sizes"] == "full" else f" ({report['sizes']})"
    return (
        f"`python -m benchmarks.{report['benchmark']}`{sizes} on {found['gpu']}, driver {found.get('driver', 'none')}, "
        f"CUDA {found.get('cuda', 'none')}, torch {found['torch']}, Python {found.get('python', '?')}, "
        f"{found['cores']} cores, {found['date']}."
    )


# ── targets ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of something that has a target."""

    words: str
    target: str
    is_reached: bool

    @property
    def verdict(self) -> str:
        """Reached or missed."""
        return "reached" if self.is_reached else "MISSED"


def findings(reports: Reports) -> Iterator[Finding]:
    """Yield what has been measured of all that has a target."""
    device, cases = reports.get("device", {}), reports.get("cases", {})
    loops = [*device.get("steps", []), *device.get("graph", []), *cases.get("cases", [])]
    long = [row for row in device.get("steps", []) if median(_of(row, RESIDENT)) >= SHORTEST_MS]
    if long:
        least = min(median(_ratios(row, RESIDENT, AHEAD)) for row in long)
        words = "`device=` trains at {} of the speed of data that is on the GPU already, from an epoch's first batch on"
        yield _at_least(words, f"{least:.3f}", 0.98)
    if loops:
        least = min(median(_ratios(row, way, AHEAD)) for row in loops for way in (TORCH, PINNED))
        words = "in the worst of %s it has {} of the speed of a pinned loader, torch's or penstock's"
        yield _at_least(words % _count(len(loops), "loop"), f"{least:.3f}", 0.99)
    if (speed := _images_speed(cases)) is not None:
        words = "the images program is {} times as fast with `device=` as with torch's best setting"
        yield _at_least(words, f"{speed:.2f}", 1.2)
    if device.get("link"):
        best = max(median(row["slot"]) for row in device["link"])
        words = "copies from a slot reach {} of the link's bandwidth"
        yield _at_least(words, f"{best / _ceiling(device['link']):.2f}", 0.95)
    if device.get("corruption"):
        wrong, batches = (sum(row[name] for row in device["corruption"]) for name in ("wrong_elements", "batches"))
        words = f"{wrong} elements of {batches:,} batches were wrong".replace(",", " ")
        yield Finding(words=words, target="0", is_reached=not wrong)
    for load, of, most in (
        ("clips and labels", "a tensor and a label", 1500),
        ("dict of three", "a dict of three", 1800),
    ):
        for row in device.get("instructions", []):
            if (row["load"], row["way"]) == (load, AHEAD):
                words = f"a `device=` batch of {of} takes {{}} instructions of the interpreter"
                yield _at_most(words, f"{row['batch']:.0f}", most)
    if device.get("batches"):
        most_cpu = max(median(_ratios(row, AHEAD, PINNED, "cpu_us")) for row in device["batches"])
        words = "it costs the training thread {} times the CPU time of a pinned batch"
        yield _at_most(words, f"{most_cpu:.2f}", 1)
    yield from _plans_found(reports)
    if rows := reports.get("fit", {}).get("overhead"):
        longest = max(row["of_seconds"]["TrainStep"]["ratio"] for row in rows)
        yield _at_most("a TrainStep takes {} times as long as a step by hand", f"{longest:.3f}", 1.02)


def _plans_found(reports: Reports) -> Iterator[Finding]:
    for name in ("plan", "plans"):
        models = [row for row in reports.get(name, {}).get("models", []) if "error" in row]
        if models:
            gpu = reports[name]["machine"]["gpu"]
            where = "" if gpu == (_machine(reports) or {}).get("gpu") else f" on {gpu}"
            most = f"{100 * max(abs(row['error']) for row in models):.1f} %"
            subject = "the plan of a model" if len(models) == 1 else f"plans of {len(models)} models of up to"
            size = f"{max(row['parameters'] for row in models) / 1e9:.1f} billion parameters"
            of = f"{subject} of {size} is" if len(models) == 1 else f"{subject} {size} are"
            yield _at_most(f"{of} off by {{}} at most{where}", most, 5, " %")


def _at_least(words: str, found: str, target: float) -> Finding:
    return Finding(words=words.format(found), target=f"at least {target:g}", is_reached=float(found) >= target)


def _at_most(words: str, found: str, target: float, unit: str = "") -> Finding:
    is_reached = float(found.removesuffix(unit)) <= target
    return Finding(words=words.format(found), target=f"at most {target:g}{unit}", is_reached=is_reached)


def _of(row: Row, way: str, figure: str = "step_ms") -> list[float]:
    return [each[way][figure] for each in row["rounds"]]


def _ratios(row: Row, over: str, under: str, figure: str = "step_ms") -> list[float]:
    """Return one figure by another, round by round."""
    return [a / b for a, b in zip(_of(row, over, figure), _of(row, under, figure), strict=True)]


def _images_speed(cases: Row) -> float | None:
    row = next((row for row in cases.get("cases", []) if row["case"] == "images"), None)
    if row is None:
        return None
    settings = next((one["settings"] for one in cases.get("articles", []) if one["case"] == "images"), {})
    torchs = [median(_of(row, TORCH)), *(one["step_ms"] for one in settings.values())]
    return min(torchs) / median(_of(row, AHEAD))


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


# ── in one sentence ─────────────────────────────────────────────────────────────────────────────────────────


def _sentence(reports: Reports) -> str:
    """Return what a user asks first, and how many of the targets are reached."""
    if "gpu" not in reports:
        return f"{NEVER}; `make gpu`, which tests and measures there, is ready."
    device = reports.get("device", {})
    said = []
    for row in device.get("graph", []):
        ahead, pinned, torchs = (f"{median(_ratios(row, RESIDENT, way)):.2f}" for way in (AHEAD, PINNED, TORCH))
        said.append(
            f"a step in a CUDA graph runs at {ahead} of its speed on data that is on the GPU already with `device=`, "
            f"at {pinned} with penstock's pinned batches and at {torchs} with torch's"
        )
    if steps := [median(_ratios(row, RESIDENT, AHEAD)) for row in device.get("steps", [])]:
        said.append(f"steps whose kernels the host launches at {min(steps):.2f} to {max(steps):.2f} with `device=`")
    found = [*findings(reports)]
    reached = sum(one.is_reached for one in found)
    said.append(f"{reached} of {_count(len(found), 'target')} are reached")
    return f"On {_where(reports)}: {'; '.join(said)} ([all of it](docs/gpu-figures.md#targets))."


def _state(reports: Reports) -> str:
    """Return whether a GPU has run it, for pages that say what else it was proved on."""
    return f"Penstock was tested and measured on {_where(reports)}." if "gpu" in reports else f"{NEVER}."


def _where(reports: Reports) -> str:
    machine = _machine(reports)
    return f"{'an ' * machine['gpu'].startswith('NVIDIA')}{machine['gpu']} ({machine['date']})" if machine else "a GPU"


def _machine(reports: Reports) -> Row | None:
    names = [name for name in ("device", "cases", "tests", *reports) if name in reports]
    return next((reports[name]["machine"] for name in names if "gpu" in reports[name].get("machine", {})), None)


def _tests(reports: Reports) -> str | None:
    rows = reports.get("tests", {}).get("tests", [])
    if not rows:
        return None
    counts = [(word, sum(row["outcome"] == word for row in rows)) for word in ("passed", "failed", "skipped")]
    words = [f"{count} {word}" for word, count in counts if count]
    return f"{_count(len(rows), 'test')}: {', '.join(words)}"


def _targets(reports: Reports) -> str:
    rows = [(one.words, one.target, one.verdict) for one in findings(reports)]
    return _table(("found", "target", ""), rows) if rows else NOT_YET


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────


def _parts(reports: Reports) -> str:
    if "gpu" not in reports:
        return f"{NEVER}."
    parts = reports["gpu"]["parts"].items()
    tests = _tests(reports)
    rows = [
        (name, one["state"], f"{one['seconds']:.0f} s", (tests or "") if name == "tests" else one.get("words", ""))
        for name, one in parts
    ]
    return _table(("part", "ended", "in", ""), rows)


def _decoding(report: Row) -> str:
    rows = []
    for row in report["decoding"]:
        host, *gpus = row["rounds"][0]
        words = "{mean:.2f} on average, {most:.0f} at most".format(**row) if "mean" in row else row.get("lacks", "")
        rates = _spread([one[host] for one in row["rounds"]], 0)
        there = _spread([one[gpus[0]] for one in row["rounds"]], 0) if gpus else "not measured"
        rows.append((row["name"], rates, there, words))
    heads = ("decoded", "by 8 workers on the host, per second", "on the GPU, per second", "pixels apart, of 255")
    return _table(heads, rows)


def _ceiling(rows: list[Row]) -> float:
    return float(max(max(row["torch pinned"]) for row in rows))


def _link(report: Row) -> str:
    heads = ("copied to the GPU", "from a slot, GB/s", "pinned by torch, GB/s", "slot ÷ the link's ceiling")
    ceiling = _ceiling(report["link"])
    rows = [
        (
            f"{row['mib']} MiB",
            _spread(row["slot"], 1),
            _spread(row["torch pinned"], 1),
            f"{median(row['slot']) / ceiling:.2f}",
        )
        for row in report["link"]
    ]
    return _table(heads, rows)


def _instructions(report: Row) -> str:
    heads = ("batches", "way", "instructions for a batch", "least … most", "for `iter()`")
    rows = [
        (row["load"], row["way"], f"{row['batch']:.0f}", f"{row['least']} … {row['most']}", str(row["iter"]))
        for row in report["instructions"]
    ]
    return _table(heads, rows)


def _batches(report: Row) -> str:
    heads = ("batches", "way", "CPU, us", "wall time, us")
    rows = [
        (row["name"], way, *(_spread(_of(row, way, figure), 0) for figure in ("cpu_us", "wall_us")))
        for row in report["batches"]
        for way in row["rounds"][0]
    ]
    return _table(heads, rows)


def _calls(report: Row) -> str:
    rows = []
    for row in report["calls"]:
        name = row["of"] if " " in row["of"] else f"`{row['of']}`"
        is_refused = row.get("returned", 0) not in (0, 600)  # 600 is cuEventQuery's answer while work is pending
        rows.append((name, f"refused, error {row['returned']}" if is_refused else _spread(row["us"], 2)))
    return _table(("call", "us (least … most)"), rows)


def _steps(report: Row) -> str:
    heads = (
        "step",
        "fed by",
        "step, ms",
        "speed, of data on the GPU",
        "first batch after, ms",
        "waited for copies, us",
    )
    return _loops(report["steps"], heads, lambda row, way: (_copy_wait(row, way),))


def _graph(report: Row) -> str:
    heads = (
        "step", "fed by", "step, ms", "speed, of data on the GPU", "first batch after, ms",
        "host ahead, steps", "slots", "copied out",
    )  # fmt: skip
    return _loops(report["graph"], heads, _lead)


def _loops(rows: list[Row], heads: Iterable[str], more: Callable[[Row, str], tuple[str, ...]]) -> str:
    found = []
    for row in rows:
        for number, way in enumerate(row["rounds"][0]):
            first = "" if number else f"{row['name']}, {median(_of(row, RESIDENT)):.1f} ms"
            ratio = _spread(_ratios(row, RESIDENT, way), 3)
            start = f"{median(_of(row, way, 'first_ms')):.1f}"
            found.append((first, way, _spread(_of(row, way), 2), ratio, start, *more(row, way)))
    return _table(heads, found)


def _copy_wait(row: Row, way: str) -> str:
    waited = row.get("counted", {}).get(way, {}).get("copy_wait_s")
    return "" if waited is None else f"{waited * 1e6:.0f}"


def _lead(row: Row, way: str) -> tuple[str, ...]:
    lead = (
        f"{median(_of(row, way, 'lead')):.0f}, {max(_of(row, way, 'lead_most')):.0f} at most"
        if "lead" in row["rounds"][0][way]
        else ""
    )
    counted = row.get("counted", {}).get(way)
    if counted is None:
        return lead, "", ""
    slots = f"{size_text(counted['nbytes'])} in {_count(counted['segments'], 'segment')}"
    return lead, slots, str(counted["copied_out"])


def _plans(reports: Reports) -> str:
    heads = (
        "model",
        "parameters",
        "micro-batch",
        "predicted",
        "measured",
        "off by",
        "runs in its budget",
        "twice of it",
    )
    tables = []
    for name in ("plans", "plan"):
        report = reports.get(name, {})
        rows = []
        for row in report.get("models", []):
            found = ("", "", "", "")
            if "measured" in row:
                twice = {True: "runs", False: "out of memory", None: "no such batch"}[row.get("twice_runs")]
                runs = "yes" if row["recommended_runs"] else "NO"
                found = (size_text(row["measured"]), f"{100 * row['error']:+.1f} %", runs, twice)
            count = f"{row['parameters'] / 1e6:,.1f} M".replace(",", " ")
            rows.append((row["name"], count, str(row["micro_batch"]), size_text(row["predicted"]), *found))
        if rows:
            tables.append(f"{_origin(report)}\n\n{_table(heads, rows)}")
    return "\n\n".join(tables) or NOT_YET


def _cases(report: Row) -> str:
    heads = ("program", "fed by", "step, ms", "torch's pinned step ÷ it", "idle GPU", "first batch after, ms")
    rows = []
    for row in report["cases"]:
        compiled = row.get("compiled")
        program = f"{row['case']}, not compiled" if compiled and compiled != "yes" else row["case"]
        for way in row["rounds"][0]:
            idle = max(0.0, 1 - median(_ratios(row, RESIDENT, way)))
            start = f"{median(_of(row, way, 'first_ms')):.1f}"
            rows.append(
                (program, way, _spread(_of(row, way), 2), _spread(_ratios(row, TORCH, way), 3), f"{idle:.0%}", start)
            )
            program = ""
    words = [
        f"`infer` at a camera of 25 frames a second, with `max_latency_s=0.05`: a clip's scores come after "
        f"{row['latency_ms']:.0f} ms, after {row['latency_most_ms']:.0f} ms at most."
        for row in report.get("infer", [])
    ]
    words += [
        f"{row['case']} was left out: {row['lacks']} is not installed there." for row in report.get("lacking", [])
    ]
    return "\n\n".join([_table(heads, rows), *words])


def _fit(report: Row) -> str:
    rows = []
    for row in report["overhead"]:
        found = row["of_seconds"]["TrainStep"]
        ratio = f"{found['ratio']:.4f} ({found['low']:.4f} … {found['high']:.4f})"
        rows.append((row["name"], row["optimizer"], f"{row['ms']['by hand']:.2f} ms", ratio))
    return _table(("model", "optimizer", "a step by hand", "TrainStep, of its time"), rows)


# ── beside the articles ─────────────────────────────────────────────────────────────────────────────────────────

ENGLISH = {
    "heads": ("an article says", "measure it with"),
    "transfer": ("`pin_memory=True`: transfers 40 % faster", "`non_blocking=True`: transfers 35 % faster",
                 "both: transfers 50 % faster"),
    "step": ("`pin_memory=True`: training time 20 % shorter", "`non_blocking=True`: training time 15 % shorter",
             "both: training time 25 % shorter"),
    "ahead": "(no article: `device=` of penstock, training time)",
    "share": "(the most that a faster transfer could save: its share of a step)",
    "idle": "(the GPU's idle share without any of these)",
    "none": "not measured here: run it",
    "from": "From {cases} with torch's DataLoader and {workers} workers, on {gpu}, {date}; a setting is compared with "
            "neither of the two.",
}  # fmt: skip
CHINESE = {
    "heads": ("文章的说法", "测量命令"),
    "transfer": ("`pin_memory=True`：传输快 40 %", "`non_blocking=True`：传输快 35 %", "两者同时使用：传输快 50 %"),
    "step": ("`pin_memory=True`：训练时间缩短 20 %", "`non_blocking=True`：训练时间缩短 15 %",
             "两者同时使用：训练时间缩短 25 %"),
    "ahead": "（文章之外：penstock 的 `device=`，训练时间）",
    "share": "（更快的传输最多能省下的：传输占一步的比例）",
    "idle": "（不用这些设置时 GPU 的空闲比例）",
    "none": "此处未测：请自行运行",
    "from": "数据来自 {cases}，torch 自己的 DataLoader，{workers} 个 worker，{gpu}，{date}；"
            "每种设置都与“两者都不用”比较。",
}  # fmt: skip
PROGRAMS = ("images", "text", "video", "live")
SETTINGS = ("torch, pin_memory", "torch, non_blocking", "torch, pin_memory, non_blocking")
PLAIN = "torch"
CASES_COMMAND = "`python -m benchmarks.gpu_cases --json FILE`"


def _articles(words: dict[str, Any], reports: Reports) -> str:
    """Return a row for each claim, with what was found in each of the programs."""
    report = reports.get("cases", {})
    grids = {row["case"]: row["settings"] for row in report.get("articles", [])}
    loops = {row["case"]: row for row in report.get("cases", [])}

    def row(claim: str, command: str, find: Callable[[Row, Row | None], str | None]) -> tuple[str, ...]:
        cells = (find(grids[name], loops.get(name)) if name in grids else None for name in PROGRAMS)
        return claim, command, *(cell or words["none"] for cell in cells)

    def faster(way: str) -> Callable[[Row, Row | None], str]:
        return lambda grid, _: f"{grid[PLAIN]['transfer_ms'] / grid[way]['transfer_ms'] - 1:+.0%}"

    def shorter(way: str) -> Callable[[Row, Row | None], str]:
        return lambda grid, _: f"{grid[way]['step_ms'] / grid[PLAIN]['step_ms'] - 1:+.1%}"

    def ahead(grid: Row, loop: Row | None) -> str | None:
        return loop and f"{median(_of(loop, AHEAD)) / grid[PLAIN]['step_ms'] - 1:+.1%}"

    def idle(grid: Row, loop: Row | None) -> str | None:
        return loop and f"{max(0.0, 1 - median(_of(loop, RESIDENT)) / grid[PLAIN]['step_ms']):.1%}"

    def share(grid: Row, _: Row | None) -> str:
        return f"{grid[PLAIN]['transfer_ms'] / grid[PLAIN]['step_ms']:.1%}"

    rows = [
        row(claim, "`penstock doctor --transfer`", faster(way))
        for claim, way in zip(words["transfer"], SETTINGS, strict=True)
    ]
    rows += [row(claim, CASES_COMMAND, shorter(way)) for claim, way in zip(words["step"], SETTINGS, strict=True)]
    for claim, find in (("ahead", ahead), ("share", share), ("idle", idle)):
        rows.append(row(words[claim], CASES_COMMAND, find))
    table = _table((*words["heads"], *PROGRAMS), rows)
    if not grids:
        return table
    where = {"gpu": report["machine"]["gpu"], "date": report["machine"]["date"], "cases": CASES_COMMAND}
    return f"{words['from'].format(workers=report['workers'], **where)}\n\n{table}"


def _section(part: str, rows: str, table: Callable[[Row], str]) -> Callable[[Reports], str]:
    def found(reports: Reports) -> str:
        report = reports.get(part, {})
        return f"{_origin(report)}\n\n{table(report)}" if report.get(rows) else NOT_YET

    return found


SECTIONS: dict[str, Callable[[Reports], str]] = {
    "sentence": _sentence,
    "state": _state,
    "targets": _targets,
    "parts": _parts,
    "decoding": _section("decoding", "decoding", _decoding),
    "instructions": _section("device", "instructions", _instructions),
    "batches": _section("device", "batches", _batches),
    "calls": _section("device", "calls", _calls),
    "link": _section("device", "link", _link),
    "steps": _section("device", "steps", _steps),
    "graph": _section("device", "graph", _graph),
    "plans": _plans,
    "cases": _section("cases", "cases", _cases),
    "fit": _section("fit", "overhead", _fit),
    "articles": lambda reports: _articles(ENGLISH, reports),
    "articles_zh": lambda reports: _articles(CHINESE, reports),
}
