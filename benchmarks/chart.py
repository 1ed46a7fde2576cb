"""Charts, drawn from committed results: `python -m benchmarks.chart` writes docs/everyday.svg and docs/gpu-steps.svg.

everyday.svg, README's, has a bar for each of some everyday loops, without workers and with two: torch's CPU time
divided by penstock's, on a logarithmic axis. gpu-steps.svg has a bar for each way to feed a training step on a GPU: the
step's time, in milliseconds. The files have both colour schemes and follow the reader's.
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ways import AHEAD, PINNED, RESIDENT, TORCH

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs/everyday.svg"
RESULTS = dict.fromkeys(("inline", "2 workers"), ROOT / "benchmarks/results/everyday-2core.json")
SHOWN = (
    "TensorDataset, shuffled",
    "random_split of tensors",
    "MNIST-like",
    "NumPy rows",
    "dicts of tokens",
    "sequences",
    "strings",
    "ragged, collate_fn",
    "a stream of integers",
    "images, floats",
    "images, augmented",
    "large batches of rows",
    "dear samples",
)
"""Those that gain most, those that gain least, and what lies between."""

STEPS_PICTURE = ROOT / "docs/gpu-steps.svg"
STEPS_RESULTS = ROOT / "benchmarks/results/gpu/device.json"
STEPS_SHOWN = ("clips", "tokens", "images")

_LEFT, _RIGHT, _BAR, _GAP, _TOP = 190, 560, 9, 12, 46
_LEAST, _MOST = 0.6, 16.0
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .inline { fill: #2f6fdb } .workers { fill: #e08a1e } .pinned { fill: #8fb0ea } .bound { fill: #8c959f }
  .line { stroke: #8c959f } .figure { font-size: 10px }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .inline { fill: #6ea8fe } .workers { fill: #f0b35a } }
"""


def main() -> None:
    """Write the pictures whose results are there."""
    if STEPS_RESULTS.exists() and (report := json.loads(STEPS_RESULTS.read_text()))["steps"]:
        STEPS_PICTURE.write_text(steps_picture(report))
    PICTURE.write_text(picture({name: json.loads(path.read_text()) for name, path in RESULTS.items()}))


def picture(reports: dict[str, dict[str, Any]]) -> str:
    """Return the SVG of reports of `benchmarks.everyday`, by what comes after a loop's name in their results."""
    ratios = {how: _cpu_ratios(report, how) for how, report in reports.items()}
    step = 2 * _BAR + _GAP
    height = _TOP + step * len(SHOWN) + 26
    parts = [
        f'<text x="{_LEFT}" y="16">torch\'s CPU time / penstock\'s, median of interleaved rounds</text>',
        *_key(),
        *(_rule(value, height) for value in (1, 2, 4, 8, 16)),
    ]
    for number, loop in enumerate(SHOWN):
        top = _TOP + number * step
        parts.append(f'<text x="{_LEFT - 8}" y="{top + _BAR + 4}" text-anchor="end">{escape(loop)}</text>')
        for at, (how, kind) in enumerate(zip(reports, ("inline", "workers"), strict=True)):
            parts += _bar(ratios[how].get(loop), kind, top + at * _BAR)
    return _svg(parts, height, "CPU time of torch's DataLoader divided by penstock's, for everyday loops")


def steps_picture(report: dict[str, Any]) -> str:
    """Return the SVG of the steps of a report of `benchmarks.device`."""
    kinds = {RESIDENT: "bound", TORCH.name: "workers", PINNED.name: "pinned", AHEAD.name: "inline"}
    rows = {row["name"]: row["rounds"] for row in report["steps"] if "failed" not in row}
    loads = [name for name in STEPS_SHOWN if name in rows]
    ms = {name: {way: median(one[way]["step_ms"] for one in rows[name]) for way in kinds} for name in loads}
    most = max(value for found in ms.values() for value in found.values())
    step = len(kinds) * (_BAR + 3) + 2 * _GAP
    parts = [f'<text x="{_LEFT}" y="16">milliseconds of a training step, median of rounds by turns</text>']
    for number, name in enumerate(loads):
        top = 28 + number * step
        parts.append(f'<text x="{_LEFT - 8}" y="{top - 2}" text-anchor="end" font-weight="bold">{escape(name)}</text>')
        for at, (way, kind) in enumerate(kinds.items()):
            y, width = top + at * (_BAR + 3), ms[name][way] / most * (_RIGHT - _LEFT)
            label = {RESIDENT: "data on the GPU", TORCH.name: "torch, pinned", PINNED.name: "penstock, pinned"}.get(
                way, way
            )
            parts += [
                f'<text class="figure" x="{_LEFT - 8}" y="{y + _BAR + 8}" text-anchor="end">{escape(label)}</text>',
                f'<rect class="{kind}" x="{_LEFT}" y="{y + 9}" width="{width:.1f}" height="{_BAR}"/>',
                f'<text class="figure" x="{_LEFT + width + 4:.1f}" y="{y + _BAR + 8}">{ms[name][way]:.2f}</text>',
            ]
    return _svg(parts, 28 + step * len(loads) + 6, "Time of a training step on a GPU, by what feeds it")


def _svg(parts: list[str], height: int, what: str) -> str:
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" role="img" aria-label="{what}">\n'
        f"  <style>{_STYLE}  </style>\n  {body}\n</svg>\n"
    )


def _cpu_ratios(report: dict[str, Any], how: str) -> dict[str, float]:
    return {
        result["name"].removesuffix(f", {how}"): median(result["ratios"]["torch"])
        for result in report["results"]
        if result["unit"] == "samples/CPU s" and result["name"].endswith(f", {how}")
    }


def _key() -> list[str]:
    return [
        f'<rect class="inline" x="{_LEFT}" y="24" width="10" height="{_BAR}"/>',
        f'<text x="{_LEFT + 14}" y="33">no workers</text>',
        f'<rect class="workers" x="{_LEFT + 96}" y="24" width="10" height="{_BAR}"/>',
        f'<text x="{_LEFT + 110}" y="33">2 workers</text>',
    ]


def _rule(value: float, height: int) -> str:
    x, bottom = _place(value), height - 22
    dashes = "" if value == 1 else ' stroke-dasharray="2 3" stroke-opacity="0.5"'
    line = f'<line class="line" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}"{dashes}/>'
    return f'{line}<text class="figure" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'


def _bar(ratio: float | None, kind: str, top: int) -> list[str]:
    if ratio is None:
        return []
    start, end = sorted((_place(1), _place(ratio)))
    return [
        f'<rect class="{kind}" x="{start:.1f}" y="{top}" width="{max(1.0, end - start):.1f}" height="{_BAR - 1}"/>',
        f'<text class="figure" x="{max(end, _place(1)) + 4:.1f}" y="{top + _BAR - 1}">{ratio:.1f}</text>',
    ]


def _place(ratio: float) -> float:
    share = math.log(max(_LEAST, min(_MOST, ratio)) / _LEAST) / math.log(_MOST / _LEAST)
    return _LEFT + share * (_RIGHT - _LEFT)


if __name__ == "__main__":
    main()
