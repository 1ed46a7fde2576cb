"""All that needs a GPU, in one command: `python -m benchmarks.gpu --out DIR [--minutes 6] [--tiny] [part ...]`.

Each part is a process of its own with a limit; all of them together take two calls of six minutes at most. What a part
has measured lies in DIR after every row, its output in `log.txt`, and how it ended in `gpu.json`. A second call goes on
with what is missing, and measures again what was measured of other code.
Nothing needs to be installed but torch and NumPy: run it in the repository with PYTHONPATH=src. The tests need pytest,
programs on images Pillow and on films PyAV (Pillow otherwise), decoding on the GPU torchvision and torchcodec; what is
missing is named. Where DIR does not outlast a call, put what came back of it into the next call's DIR first.
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
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from benchmarks.machine_facts import facts
from benchmarks.row_file import UNFINISHED

ROOT = Path(__file__).parents[1]
LOG_NBYTES = 4 << 20
"""What is kept of the output of all parts, the last."""

MARGIN_S = 4.0
"""A part is told to end so long before it is ended."""

LOADING = ("src/penstock/device", "src/penstock/loader", "benchmarks/ways.py", "benchmarks/workloads.py")
MEMORY = ("src/penstock/memory",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing to run."""

    name: str
    command: tuple[str, ...]
    """Arguments of Python."""

    limit_s: float
    """What it may take."""

    file: str = ""
    """The report that its rows are in, with those of other parts; by default one of its own."""

    least_s: float = 15.0
    """It is not begun with less."""

    needs: str | None = None
    """The module that it cannot do without."""

    code: tuple[str, ...] = LOADING
    """What is measured: files and folders, and the module that is run."""


def _device(limit_s: float, *parts: str) -> Part:
    return Part(
        name=parts[0], command=("-m", "benchmarks.device", "--parts", *parts), limit_s=limit_s, file="device",
        code=(*LOADING, "benchmarks/device.py", "benchmarks/instructions.py"),
    )  # fmt: skip


def _program(case: str, limit_s: float) -> Part:
    return Part(
        name=case, command=("-m", "benchmarks.gpu_cases", "--cases", case), limit_s=limit_s, file="cases",
        code=(*LOADING, "benchmarks/gpu_cases.py"), least_s=0.8 * limit_s,
    )  # fmt: skip


PARTS = (
    Part(
        name="tests", command=("-m", "benchmarks.gpu_tests"), limit_s=60, needs="pytest",
        code=("src/penstock", "tests/cuda"),
    ),
    Part(
        name="decoding", command=("-m", "benchmarks.gpu_decoding"), limit_s=45,
        code=("src/penstock/data/formats", "benchmarks/gpu_decoding.py"),
    ),
    _device(44, "host", "link", "instructions"), _device(105, "steps"), _device(30, "graph"), _device(25, "corruption"),
    _program("images", 75), _program("text", 85), _program("video", 42), _program("live", 38),
    Part(
        name="fit", command=("-m", "benchmarks.fit", "--quick", "--rows", "CNN, SGD", "transformer, AdamW"), limit_s=28,
        code=(*MEMORY, "benchmarks/fit.py"),
    ),
    Part(
        name="plan", command=("-m", "benchmarks.plans", "--models", "GPT 7B bf16"), limit_s=60,
        code=(*MEMORY, "benchmarks/plans.py"),
    ),
)  # fmt: skip
"""In order of worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a part ended."""

    state: str
    """done, failed, out of time, or left out; what was measured until then is there."""

    exit_code: int | None
    seconds: float
    code: str
    """What names the code that it ran."""

    words: str = ""
    """Why it was left out or failed."""

    failed: list[str] = field(default_factory=list)
    """The tests that failed, as pytest names them."""


def main(parts: Sequence[Part] = PARTS) -> int:
    """Run, print, write; return 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=6.0, metavar="M", help="for all of it (default: %(default)g)")
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
        code = code_of(part)
        before = outcomes.get(part.name)
        if not asked.parts and before is not None and before.state == "done" and before.code == code:
            continue
        left_s = end - time.monotonic()
        if left_s < part.least_s:
            print(f"{part.name}: not begun, {left_s:.0f} s are left; call again", flush=True)
            continue
        found = outcomes[part.name] = _run(part, code, asked.out, min(part.limit_s, left_s), ["--tiny"] * asked.tiny)
        print(
            f"{part.name}: {found.state} after {found.seconds:.0f} s{'; ' * bool(found.words)}{found.words}", flush=True
        )
        _write(asked.out, outcomes)
    done = sum(outcome.state == "done" for outcome in outcomes.values())
    failed = [name for name, outcome in outcomes.items() if outcome.state == "failed"]
    print(f"gpu: {done} of {len(parts)} parts done{'; failed: ' * bool(failed)}{', '.join(failed)}; see {asked.out}")
    return 1 if failed else 0


def code_of(part: Part) -> str:
    """Return a name for the contents of what a part measures."""
    digest = sha256()
    for name in part.code:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run(part: Part, code: str, out: Path, limit_s: float, options: list[str]) -> Outcome:
    if part.needs is not None and find_spec(part.needs) is None:
        words = f"{part.needs} is not installed here"
        return Outcome(state="left out", exit_code=None, seconds=0.0, code=code, words=words)
    began = time.monotonic()
    until = began + max(1.0, limit_s - MARGIN_S)
    file = out / f"{part.file or part.name}.json"
    results = (*options, "--resume", "--json", str(file), "--code", code, "--until", f"{until:.1f}")
    output = out / "part.txt"
    with output.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, *part.command, *results], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            ended: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            _end(process)
    text = output.read_text(errors="replace")
    output.unlink()
    log = out / "log.txt"
    before = log.read_text() if log.exists() else ""
    log.write_text(f"{before}── {part.name} ──\n{text}\n"[-LOG_NBYTES:])
    for partial in out.glob(".*.json.*"):  # it was ended while it wrote
        partial.unlink()
    state = {None: "out of time", 0: "done", UNFINISHED: "out of time"}.get(ended, "failed")
    lines = [line for line in text.splitlines() if line.strip()]
    return Outcome(
        state=state, exit_code=ended, seconds=round(time.monotonic() - began, 1), code=code,
        words=lines[-1] if state == "failed" and lines else "",
        failed=[line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")],
    )  # fmt: skip


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
