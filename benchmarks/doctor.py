"""The doctor on loops whose problem is known: `python -m benchmarks.doctor [--quick] [--load N] [--json FILE]`.

Each program of `benchmarks/pathologies` is examined in a process of its own, by default three times, in turns. Of a
loop with one known problem three things are counted: the problem is first (the verdict, and the first finding), it is
named anywhere with what to change, or it is missed. Of a healthy loop nothing is to be said. Where the advice is about
speed, it is followed, and what that gave is measured beside the loop as it was (ratios of paces, three rounds in turns)
and shown next to what the doctor had promised. With --load, that many processes compute meanwhile. The file has all
measurements, from which --show derives the findings anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine_facts import facts
from benchmarks.pathologies import FOLDER, HEALTHY, PROBLEMS
from penstock.observe.doctor.causes import Diagnosis, diagnose
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.known_fields import build_from_known

HEALTHY_SECONDS = 3.0
NEAR = 1.5
"""How far a stated gain may be from what following the advice gives."""

MARKS = ("first", "named", "missed")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="each loop once")
    parser.add_argument("--loops", nargs="*", default=[*PROBLEMS, *HEALTHY], help="only these")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="beside N processes that compute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what --json wrote, and measure nothing")
    asked = parser.parse_args()
    if asked.show:
        _print(read_results(asked.show), json.loads(asked.show.read_text())["load"])
        return
    rounds = 1 if asked.quick else 3
    found: dict[str, list[Examination]] = {script: [] for script in asked.loops}
    console = Console(stderr=True)
    with _load(asked.load):
        for script in asked.loops * rounds:
            found[script].append(examined(script, follow=True))
            console.print(f"{script}: {found[script][-1].mark}", style="dim")
            if asked.json:
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                loops = {script: [asdict(one) for one in rounds] for script, rounds in found.items()}
                report = {"benchmark": "doctor", "machine": facts(), "load": asked.load, "loops": loops}
                asked.json.write_text(json.dumps(report, default=repr) + "\n")
    _print(found, asked.load)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """One program, examined once."""

    measurements: Measurements

    steps_per_s: tuple[tuple[float, float], ...] = ()
    """The pace as it was and after following the advice, round by round; empty where it has no `fixed`."""

    @property
    def diagnosis(self) -> Diagnosis:
        """What follows from the measurements."""
        return diagnose(self.measurements)

    @property
    def mark(self) -> str:
        """How well the problem was found; see MARKS."""
        found = self.diagnosis
        if self.measurements.name in HEALTHY:
            return MARKS[0] if (found.verdict.name, found.findings) == ("healthy", ()) else MARKS[2]
        problem = PROBLEMS[self.measurements.name]
        return MARKS[0] if problem.is_first_in(found) else MARKS[1] if problem.is_named_in(found) else MARKS[2]

    @property
    def promised(self) -> float | None:
        """The gain that the finding stated."""
        name = PROBLEMS[self.measurements.name].finding
        return next((one.gain for one in self.diagnosis.findings if one.name == name), None)


def examined(script: str, *, follow: bool = False, patience: float = 1.0) -> Examination:
    """Examine a program of `benchmarks/pathologies` in a process of its own.

    Args:
        script: its name.
        follow: also measure what following the advice gives; see `benchmarks.examined_loop`.
        patience: how many times its usual time it gets.

    Raises:
        subprocess.CalledProcessError: it failed; its words went to stderr.
    """
    seconds = patience * (PROBLEMS[script].seconds if script in PROBLEMS else HEALTHY_SECONDS)
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as cgroup:
        done = subprocess.run(
            [sys.executable, str(FOLDER.parent / "examined_loop.py"), script, str(seconds), cgroup, "follow" * follow],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            check=True,
        )
    return build_from_known(Examination, json.loads(done.stdout.splitlines()[-1]))  # after what the program prints


def read_results(file: Path) -> dict[str, list[Examination]]:
    """Return what --json wrote: the examinations of each program."""
    loops = json.loads(file.read_text())["loops"]
    return {script: [build_from_known(Examination, one) for one in rounds] for script, rounds in loops.items()}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@contextmanager
def _load(processes: int) -> Iterator[None]:
    computing = [mp.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(processes)]
    for one in computing:
        one.start()
    try:
        yield
    finally:
        for one in computing:
            one.terminate()
            one.join()


def _compute() -> None:
    while True:
        sum(range(1000))


def _print(found: dict[str, list[Examination]], load: int) -> None:
    table = Table("loop", "problem", *MARKS, "verdicts", "promised", "given")
    totals: Counter[str] = Counter()
    healthy: Counter[str] = Counter()
    is_near: list[bool] = []
    for script, rounds in found.items():
        marks = Counter(one.mark for one in rounds)
        (healthy if script in HEALTHY else totals).update(marks)
        promised = None if script in HEALTHY else _median(one.promised for one in rounds)
        given = _median(fixed / as_is for one in rounds for as_is, fixed in one.steps_per_s)
        if promised and given:
            is_near.append(1 / NEAR <= promised / given <= NEAR)
        table.add_row(
            script,
            "none" if script in HEALTHY else PROBLEMS[script].finding or "its verdict",
            *(str(marks[mark] or "") for mark in MARKS),
            ", ".join(sorted({one.diagnosis.verdict.name for one in rounds})),
            *(f"{gain:.2f}" if gain else "" for gain in (promised, given)),
        )
    Console().print(table)
    print(
        f"doctor: {totals.total()} examinations of loops with a problem: first in {totals['first']}, named in "
        f"{totals['first'] + totals['named']}; {healthy['first']} of {healthy.total()} called healthy; promises "
        f"within {NEAR:g} times of what following them gave: {sum(is_near)} of {len(is_near)}; load {load}"
    )


if __name__ == "__main__":
    main()
