"""The README's chart, drawn from committed results: `python -m benchmarks.chart` writes docs/everyday.svg.

A bar for each of some everyday loops, without workers and with two: torch's CPU time divided by penstock's. The axis is
logarithmic. The file has both colour schemes and follows the reader's.
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

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

_LEFT, _RIGHT, _BAR, _GAP, _TOP = 190, 560, 9, 12, 46
_LEAST, _MOST = 0.6, 16.0
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .inline { fill: #2f6fdb } .workers { fill: #e08a1e } .line { stroke: #8c959f } .figure { font-size: 10px }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .inline { fill: #6ea8fe } .workers { fill: #f0b35a } }
"""


def main() -> None:
    """Write the picture."""
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
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" role="img" '
        f"aria-label=\"CPU time of torch's DataLoader divided by penstock's, for everyday loops\">\n"
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
