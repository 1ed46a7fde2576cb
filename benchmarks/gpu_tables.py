"""What `benchmarks.gpu` found, as Markdown for the pages: a marker names the folder of results and a section.

A section whose results are not there says so. `make gpu` fills in all pages, through `benchmarks.table --page`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.benchmark_result import Spread
from benchmarks.row_file import measured
from penstock.core.units import size_text

Reports = dict[str, dict[str, Any]]
NOT_YET = "Not measured yet (`make gpu`)."
NEVER = "No real GPU has run this code yet"
TARGETS = {"link": 0.95, "steps": 0.98, "plain": 0.99, "plans": 0.05, "fit": 1.02}


def section(folder: Path, name: str) -> str:
    """Return a section of the results in `folder`.

    Raises:
        KeyError: there is no such section.
    """
    reports = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    for part, report in reports.items():  # of the programs, the table says what failed; else the parts' last lines do
        report.update({rows: measured(value) for rows, value in report.items() if part != "cases"})
    return SECTIONS[name](reports)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *escaped))


def _spread(values: list[float], digits: int) -> str:
    one = Spread.of(values)
    return f"{one.median:.{digits}f} ({one.lowest:.{digits}f} … {one.highest:.{digits}f})"


def _origin(report: dict[str, Any]) -> str:
    found = report["machine"]
    sizes = "" if report["sizes"] == "full" else f" ({report['sizes']})"
    return (
        f"`python -m benchmarks.{report['benchmark']}`{sizes} on {found['gpu']}, driver {found.get('driver', 'none')}, "
        f"CUDA {found.get('cuda', 'none')}, torch {found['torch']}, {found['cores']} cores, {found['date']}."
    )


# ── in one sentence ─────────────────────────────────────────────────────────────────────────────────────────────


def _sentence(reports: Reports) -> str:
    """Return what was found on a GPU, with every target and whether it is reached."""
    if "gpu" not in reports:
        return f"{NEVER}; `make gpu`, which tests and measures there, is ready."
    said = [text for find in (_tests, _corruption, _link_words, _steps_words, _plans_words, _fit_words)
            if (text := find(reports)) is not None]  # fmt: skip
    return f"On {_where(reports)}: {'; '.join(said) or 'nothing was measured'} ([all of it](docs/gpu.md))."


def _state(reports: Reports) -> str:
    """Return whether a GPU has run it, for pages that say what else it was proved on."""
    return f"It has run on {_where(reports)}." if "gpu" in reports else f"{NEVER}."


def _where(reports: Reports) -> str:
    machine = next((one["machine"] for one in reports.values() if "gpu" in one["machine"]), None)
    return f"{machine['gpu']}, {machine['date']}" if machine else "a GPU"


def _tests(reports: Reports) -> str | None:
    tests = reports["gpu"]["parts"].get("tests")
    return None if tests is None else f"tests: {tests['summary'].strip('= ')}"


def _corruption(reports: Reports) -> str | None:
    found = reports.get("link", {}).get("corruption")
    return found and f"{found['wrong_elements']} wrong elements in {found['batches']} batches"


def _link_words(reports: Reports) -> str | None:
    rows = reports.get("link", {}).get("link")
    if not rows:
        return None
    best = max(median(row["gb_per_s"]["slot"]) for row in rows)
    return f"copies from slots reach {_verdict(best / _ceiling(rows), TARGETS['link'], 2)} of the link"


def _steps_words(reports: Reports) -> str | None:
    rows = reports.get("steps", {}).get("steps")
    if not rows:
        return None
    least = min(median(row["of_the_bound"]["penstock, device="]) for row in rows)
    after = min(median(row["of_the_bound_after_first"]["penstock, device="]) for row in rows)
    plain = min(median(row["of_plain"]["penstock, device="]) for row in rows)
    return (
        f"`device=` reaches {_verdict(least, TARGETS['steps'], 3)} of steps whose data is there already, {after:.3f} "
        f"from an epoch's first batch on, and {_verdict(plain, TARGETS['plain'], 3)} of a plain `.to`"
    )


def _plans_words(reports: Reports) -> str | None:
    errors = [abs(row["error"]) for row in reports.get("plans", {}).get("models", []) if "error" in row]
    if not errors:
        return None
    word = "reached" if max(errors) <= TARGETS["plans"] else "MISSED"
    return f"plans of {len(errors)} models are off by {max(errors):.1%} at most (target 5 %, {word})"


def _fit_words(reports: Reports) -> str | None:
    rows = reports.get("fit", {}).get("overhead")
    if not rows:
        return None
    most = max(row["of_seconds"]["TrainStep"]["ratio"] for row in rows)
    word = "reached" if most <= TARGETS["fit"] else "MISSED"
    return f"a TrainStep takes {most:.3f} of a step by hand at most (target {TARGETS['fit']}, {word})"


def _verdict(found: float, target: float, digits: int) -> str:
    return f"{found:.{digits}f} (target {target}, {'reached' if found >= target else 'MISSED'})"


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _parts(reports: Reports) -> str:
    if "gpu" not in reports:
        return f"{NEVER}."
    parts = reports["gpu"]["parts"].items()
    rows = [(name, one["state"], f"{one['seconds']:.0f} s", one["summary"].strip("= ")) for name, one in parts]
    return _table(("part", "ended", "in", "its last line"), rows)


def _ceiling(rows: list[dict[str, Any]]) -> float:
    return float(max(max(row["gb_per_s"]["torch pinned"]) for row in rows))


def _link(report: dict[str, Any]) -> str:
    heads = ("copied to the GPU", "from a slot, GB/s", "pinned by torch", "pageable", "slot ÷ the link's ceiling")
    rows = [
        (
            f"{row['mib']} MiB",
            *(_spread(row["gb_per_s"][name], 1) for name in ("slot", "torch pinned", "pageable")),
            f"{median(row['gb_per_s']['slot']) / _ceiling(report['link']):.2f}",
        )
        for row in report["link"]
    ]
    return _table(heads, rows)


def _costs(report: dict[str, Any]) -> str:
    return _table(
        ("what", "us (least … most)"),
        [(row["of"], _spread(row["us"], 1) if row["us"] else "refused") for row in report["costs"]],
    )


def _steps(report: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['name']}, {row['step_ms']:.1f} ms" if name == "resident" else "",
            name,
            _spread(rates, 0),
            _spread(row["of_the_bound"][name], 3),
            _spread(row["of_the_bound_after_first"][name], 3),
            f"{median(row['first_batch_ms'][name]):.1f}",
        )
        for row in report["steps"]
        for name, rates in row["samples_per_s"].items()
    ]
    heads = (
        "step",
        "fed by",
        "samples/s",
        "of data that lies on the GPU",
        "from the first batch on",
        "first batch after, ms",
    )
    return _table(heads, rows)


def _plans(report: dict[str, Any]) -> str:
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
    rows = []
    for row in report["models"]:
        found = ("", "", "", "")
        if "measured" in row:
            twice = {True: "runs", False: "out of memory", None: "no such batch"}[row.get("twice_runs")]
            runs = "yes" if row["recommended_runs"] else "NO"
            found = (size_text(row["measured"]), f"{100 * row['error']:+.1f} %", runs, twice)
        count = f"{row['parameters'] / 1e6:,.1f} M".replace(",", " ")
        rows.append((row["name"], count, str(row["micro_batch"]), size_text(row["predicted"]), *found))
    return _table(heads, rows)


def _cases(report: dict[str, Any]) -> str:
    heads = ("program", "loader", "workers", "setting", "transfer, ms", "step, ms", "idle GPU", "host memory")
    rows = []
    for row in report["cases"]:
        if "loader" not in row:
            words = f"needs {row['lacks']}" if "lacks" in row else f"failed: {row['failed'].splitlines()[-1]}"
            rows.append((row["case"], words, *[""] * 6))
            continue
        if "latency_ms" in row:
            words = (
                f"a clip's scores come after {row['latency_ms']:.0f} ms, after {row['latency_most_ms']:.0f} ms at most"
            )
            rows.append((row["case"], "`infer`", "0", "`max_latency_s=0.05`", words, "", "", ""))
            continue
        transfer = f"{row['transfer_ms']:.2f}" if "transfer_ms" in row else f"{row.get('copies_hidden', 0):.0%} hidden"
        measured = (transfer, f"{row['step_ms']:.2f}", f"{row['idle']:.0%}", size_text(row["host_nbytes"]))
        program = f"{row['case']}, not compiled" if row.get("compiled", "yes") != "yes" else row["case"]
        rows.append((program, row["loader"], str(row["num_workers"]), _setting(row), *measured))
    return _table(heads, rows)


def _setting(row: dict[str, Any]) -> str:
    if row["ahead"]:
        return "`device=`"
    return " ".join(f"`{name}`" for name in ("pin_memory", "non_blocking") if row[name]) or "none"


def _fit(report: dict[str, Any]) -> str:
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
PROGRAMS = ("images", "text", "video")
SETTINGS = ((True, False), (False, True), (True, True))
CASES_COMMAND = "`python -m benchmarks.gpu_cases --json FILE`"


def _articles(words: dict[str, Any], reports: Reports) -> str:
    """Return a row for each claim, with what was found in each of the programs."""
    report = reports.get("cases", {"cases": []})
    grids = {name: _grid(report["cases"], name) for name in PROGRAMS}

    def row(claim: str, command: str, find: Callable[[dict[Any, dict[str, Any]]], str | None]) -> tuple[str, ...]:
        return claim, command, *((find(grids[name]) or words["none"]) for name in PROGRAMS)

    rows = [
        row(claim, "`penstock doctor --transfer`", lambda grid, way=way: _change(grid, way, "transfer_ms"))
        for claim, way in zip(words["transfer"], SETTINGS, strict=True)
    ]
    rows += [
        row(claim, CASES_COMMAND, lambda grid, way=way: _change(grid, way, "step_ms"))
        for claim, way in zip(words["step"], SETTINGS, strict=True)
    ]
    rows += [
        row(words["ahead"], CASES_COMMAND, lambda grid: _change(grid, "ahead", "step_ms")),
        row(words["share"], CASES_COMMAND, _transfer_share),
        row(words["idle"], CASES_COMMAND, lambda grid: f"{grid[False, False]['idle']:.1%}" if grid else None),
    ]
    table = _table((*words["heads"], *PROGRAMS), rows)
    measured = [one for one in report["cases"] if "loader" in one]
    if not measured:
        return table
    where = {"gpu": report["machine"]["gpu"], "date": report["machine"]["date"], "cases": CASES_COMMAND}
    return f"{words['from'].format(workers=max(one['num_workers'] for one in measured), **where)}\n\n{table}"


def _grid(rows: list[dict[str, Any]], case: str) -> dict[Any, dict[str, Any]]:
    """Return the rows of a program with most workers: torch's by (pin_memory, non_blocking), and ours with device=."""
    rows = [row for row in rows if "loader" in row]
    most = max((row["num_workers"] for row in rows), default=0)
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        if row["case"] == case and row["num_workers"] == most and (row["ahead"] or row["loader"] == "torch"):
            found["ahead" if row["ahead"] else (row["pin_memory"], row["non_blocking"])] = row
    return found if (False, False) in found else {}


def _change(grid: dict[Any, dict[str, Any]], way: Any, figure: str) -> str | None:
    """Return how much faster a transfer is, or by how much the time of a step changes."""
    if way not in grid:
        return None
    before, after = grid[False, False][figure], grid[way][figure]
    if figure == "transfer_ms":
        return f"{before / after - 1:+.0%}"
    return f"{after / before - 1:+.1%}"


def _transfer_share(grid: dict[Any, dict[str, Any]]) -> str | None:
    plain = grid.get((False, False))
    return plain and f"{plain['transfer_ms'] / plain['step_ms']:.1%}"


def device_tables(report: dict[str, Any]) -> str:
    """Return the tables of a report of `benchmarks.device`, of the parts that it has."""
    tables = (("costs", _costs), ("link", _link), ("steps", _steps))
    return "\n\n".join([_origin(report), *(table(report) for rows, table in tables if report[rows])])


def _of(part: str, rows: str, table: Callable[[dict[str, Any]], str]) -> Callable[[Reports], str]:
    def found(reports: Reports) -> str:
        report = reports.get(part, {})
        return f"{_origin(report)}\n\n{table(report)}" if report.get(rows) else NOT_YET

    return found


SECTIONS: dict[str, Callable[[Reports], str]] = {
    "sentence": _sentence,
    "state": _state,
    "parts": _parts,
    "costs": _of("link", "costs", _costs),
    "link": _of("link", "link", _link),
    "steps": _of("steps", "steps", _steps),
    "plans": _of("plans", "models", _plans),
    "cases": _of("cases", "cases", _cases),
    "fit": _of("fit", "overhead", _fit),
    "articles": lambda reports: _articles(ENGLISH, reports),
    "articles_zh": lambda reports: _articles(CHINESE, reports),
}
