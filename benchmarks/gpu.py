"""All that needs a GPU, in one command: `python -m benchmarks.gpu --out DIR [--minutes 9] [--tiny] [part ...]`.

Each part is a process of its own with a limit; parts come in the order of their worth. What a part has measured lies
in DIR after every row, its output in `log.txt`, and how it ended in `gpu.json`. A second call goes on with what is
missing, with rows too; a part that is done is begun again if it is named. On an H200 with 16 cores the first three took
18, 9 and 39 s; 84, 120 and 90 s were too short for the others.
Nothing needs to be installed but torch and NumPy: run it in the repository with PYTHONPATH=src. The tests need pytest,
two of the cases Pillow and PyAV; what lacks them says so.
Where DIR does not outlast a call, put what came back of it into the next call's DIR first.
With --tiny the parts take the same road in sizes that mean nothing, with or without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from benchmarks.machine_facts import facts

ROOT = Path(__file__).parents[1]
LOG_NBYTES = 4 << 20
"""What is kept of the output of all parts, the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing to run."""

    name: str
    command: tuple[str, ...]
    """Arguments of Python; {out} is the folder of results."""

    limit_s: float
    """What it may take."""

    least_s: float = 20.0
    """It is not begun with less."""

    needs: str | None = None
    """The module that it cannot do without."""


PARTS = (
    Part(
        name="tests",
        command=("-m", "benchmarks.gpu_tests"),
        limit_s=180,
        needs="pytest",
    ),
    Part(
        name="link",
        command=("-m", "benchmarks.device", "--quick", "--parts", "corruption", "costs", "link"),
        limit_s=150,
    ),
    Part(name="steps", command=("-m", "benchmarks.device", "--quick", "--parts", "steps"), limit_s=240),
    Part(name="plans", command=("-m", "benchmarks.plans"), limit_s=240),
    Part(name="cases", command=("-m", "benchmarks.gpu_cases", "--quick"), limit_s=300),
    Part(name="fit", command=("-m", "benchmarks.fit", "--quick"), limit_s=240),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a part ended."""

    state: str
    """done, failed, out of time, or left out; what was measured until then is there."""

    exit_code: int | None
    seconds: float
    summary: str
    """Its last line."""

    failed: list[str] = field(default_factory=list)
    """The tests that failed, as pytest names them."""


def main(parts: Sequence[Part] = PARTS) -> int:
    """Run, print, write; return 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="for all of it (default: %(default)g)")
    parser.add_argument("--tiny", action="store_true", help="a dry run: sizes for a test, and no tests")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(part.name for part in parts)}")
    asked = parser.parse_args()
    unknown = set(asked.parts) - {part.name for part in parts}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts)}")
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    outcomes = _read(asked.out)
    end = time.monotonic() + 60 * asked.minutes
    for part in parts:
        if asked.parts and part.name not in asked.parts:
            continue
        is_done = part.name in outcomes and outcomes[part.name].state == "done"
        if is_done and not asked.parts:
            continue
        if is_done:
            (asked.out / f"{part.name}.json").unlink(missing_ok=True)
        left_s = end - time.monotonic()
        if left_s < part.least_s:
            print(f"{part.name}: not begun, {left_s:.0f} s are left; call again", flush=True)
            continue
        outcomes[part.name] = _run(part, asked.out, min(part.limit_s, left_s), *["--tiny"] * asked.tiny)
        print(f"{part.name}: {outcomes[part.name].state}, {outcomes[part.name].summary}", flush=True)
        _write(asked.out, outcomes)
    done = sum(outcome.state == "done" for outcome in outcomes.values())
    failed = [name for name, outcome in outcomes.items() if outcome.state == "failed"]
    print(f"gpu: {done} of {len(parts)} parts done{'; failed: ' * bool(failed)}{', '.join(failed)}; see {asked.out}")
    return 1 if failed else 0


def _run(part: Part, out: Path, limit_s: float, *options: str) -> Outcome:
    if part.needs is not None and find_spec(part.needs) is None:
        return Outcome(state="left out", exit_code=None, seconds=0.0, summary=f"there is no {part.needs} here")
    began = time.monotonic()
    results = (*options, "--resume", "--json", str(out / f"{part.name}.json"))
    output = out / "part.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *part.command, *results], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    text = output.read_text(errors="replace")
    output.unlink()
    log = out / "log.txt"
    before = log.read_text() if log.exists() else ""
    log.write_text(f"{before}── {part.name} ──\n{text}\n"[-LOG_NBYTES:])
    for partial in out.glob(".*.json.*"):  # it was ended while it wrote
        partial.unlink()
    state = "out of time" if code is None else "failed" if code else "done"
    lines = [line for line in text.splitlines() if line.strip()]
    seconds = round(time.monotonic() - began, 1)
    summary = lines[-1] if lines else "it printed nothing"
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    return Outcome(state=state, exit_code=code, seconds=seconds, summary=summary, failed=failed)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a part: its workers too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(out: Path) -> dict[str, Outcome]:
    file = out / "gpu.json"
    if not file.exists():
        return {}
    return {name: Outcome(**outcome) for name, outcome in json.loads(file.read_text())["parts"].items()}


def _write(out: Path, outcomes: dict[str, Outcome]) -> None:
    found = {"benchmark": "gpu", "machine": facts(), "parts": {name: asdict(one) for name, one in outcomes.items()}}
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
