"""Mutated files through every reader: `python -m benchmarks.fuzz [--count N] [--formats ...] [--json FILE]`.

For each format, its own writer writes small files (of Arrow and Parquet also sets that differ in unit, dtype or byte
order), which are mutated: bits flipped, bytes overwritten, deleted,
inserted, doubled, numbers made extreme, ends cut off. Every mutant is opened and read to its end in a child process,
which may take a gigabyte and ten seconds for it. Only penstock's documented errors may be raised: anything else, a
hang, too much memory or a crash of the child is printed with the seed that reproduces it (`--seed`). LMDB's C code is
known to crash on damaged files, and penstock to survive it in workers: such a crash is counted, and no failure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import penstock
from benchmarks.mixed_tables import write_folders
from penstock.core.errors import PenstockError
from penstock.data.format import Format
from penstock.data.format_registry import FORMATS
from penstock.data.schema import Field, Sample, Schema, field_of

MEMORY_NBYTES = 1 << 30
TIMEOUT_S = 10.0
MAX_SAMPLES = 64
CRASHES: dict[str, tuple[signal.Signals, ...]] = {
    "lmdb": (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE),
}
"""By format: the signals by which its library ends a process."""
_ODD = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x00" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\n",
    b'"',
    b"{",
)


@dataclass(frozen=True)
class Finding:
    """A mutant that was neither read nor refused with a documented error."""

    format: str
    seed: int
    what: str


def main() -> None:
    """Mutate, read, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="mutants, over all formats (default: %(default)s)")
    parser.add_argument("--formats", nargs="*", help="only these")
    parser.add_argument("--seed", type=int, default=0, help="of the first mutant")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    started = time.perf_counter()
    formats = [one for one in FORMATS if not arguments.formats or one.name in arguments.formats]
    rows, bad = [], []
    for one in formats:
        found, wrong = fuzz_format(one, arguments.seed, max(1, arguments.count // len(formats)))
        rows.append({"format": one.name, **found})
        bad += wrong
        print(f"{one.name}: {dict(found)}", file=sys.stderr)
    for each in bad:
        print(f"{each.format}, --seed {each.seed}: {each.what}")
    mutants = sum(sum(row[kind] for kind in ("read", "refused", "crashed", "bad")) for row in rows)
    if arguments.json:
        result = {
            "benchmark": "fuzz",
            "mutants": mutants,
            "rows": rows,
            "bad": [vars(each) for each in bad],
            "seconds": round(time.perf_counter() - started, 1),
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"fuzz: {mutants} mutants of {len(rows)} formats, {len(bad)} bad; {time.perf_counter() - started:.0f} s")
    raise SystemExit(1 if bad else 0)


def fuzz_format(format: Format, first: int, count: int) -> tuple[Counter[str], list[Finding]]:
    """Read mutants `first` to `first + count` of a format; return how many were read, refused and bad, and these."""
    counted, bad = Counter(read=0, refused=0, crashed=0, bad=0), []
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        originals = write_originals(format, Path(folder) / "whole")
        seed, last = first, first + count
        while seed < last:
            for outcome, what in _read_in_child(format, originals, Path(folder), seed, last):
                counted[outcome] += 1
                if outcome == "bad":
                    bad.append(Finding(format.name, seed, what))
                seed += 1
    return counted, bad


def write_originals(format: Format, folder: Path) -> list[Path]:
    """Write small valid files of a format; return their paths, or those of their folders."""
    folder.mkdir()
    found = []
    for number, samples in enumerate(_samples(format.name)):
        path = folder / f"{number}{format.suffixes[0]}"
        if format.name == "images":
            path = folder / str(number)
        if format.writer is None:
            path.write_bytes(_encode_foreign(format.name))
        else:
            schema: Schema = {name: field_of(value) for name, value in samples[0].items()}
            if format.name == "tokens":
                schema = {"tokens": Field("array", "uint16", (None,))}
            writer = format.writer(str(path), schema)
            for sample in samples:
                writer.write(sample)
            writer.close()
        found.append(path)
    if format.name in ("arrow", "parquet"):
        found += write_folders(folder, format.suffixes[0])
    return found


def _samples(format: str) -> Iterator[list[Sample]]:
    draw = np.random.default_rng(0)
    if format == "tokens":
        yield [{"tokens": draw.integers(0, 999, size, dtype=np.uint16)} for size in (50, 3, 400, 1)]
        return
    if format == "images":
        yield [{"image": draw.integers(0, 256, (3, 9, 12), dtype=np.uint8), "label": np.int64(i % 2)} for i in range(4)]
        return
    plain = [{"number": np.int64(i), "real": np.float64(i / 3), "words": f"line {i}\u20ac"} for i in range(12)]
    yield plain
    if format == "csv":
        return
    yield [
        {
            "image": draw.integers(0, 256, (3, 8, 8), dtype=np.uint8),
            "vector": draw.normal(size=5).astype(np.float32),
            "label": np.int32(i),
            "blob": bytes(draw.integers(0, 256, 30, dtype=np.uint8)),
        }
        for i in range(12)
    ]


def _encode_foreign(format: str) -> bytes:
    if format not in ("audio", "video"):
        raise ValueError(f"{format} has no writer, and no other encoder here")
    import io
    import wave

    file = io.BytesIO()
    if format == "audio":
        with wave.open(file, "wb") as sound:
            sound.setparams((2, 2, 8000, 0, "NONE", "not compressed"))
            sound.writeframes(np.arange(2000, dtype=np.int16).tobytes())
        return file.getvalue()
    import av

    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(20):
            picture = np.full((32, 32, 3), number * 10, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


# ── one mutant ──────────────────────────────────────────────────────────────────────────────────────────────


def mutate(data: bytes, rng: Random) -> bytes:
    """Return `data` with one to four mutations.

    >>> mutate(b"penstock", Random(1)) == mutate(b"penstock", Random(1)) != b"penstock"
    True
    """
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        size = min(len(changed) - at, 1 << rng.randint(0, 8))
        match rng.randrange(7):
            case 0:
                if at < len(changed):
                    changed[at] ^= 1 << rng.randrange(8)
            case 1:
                odd = rng.choice(_ODD)
                changed[at : at + len(odd)] = odd
            case 2:
                changed[at : at + size] = rng.randbytes(size)
            case 3:
                del changed[at : at + size]
            case 4:
                changed[at:at] = rng.randbytes(size)
            case 5:
                changed[at:at] = changed[at : at + size]
            case _:
                if rng.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


def _mutant(original: Path, folder: Path, rng: Random) -> Path:
    """Write a mutant beside its original, and return it; of a folder, one of its files is mutated."""
    mutant = folder / f"mutant{original.suffix}"
    if original.is_file():
        mutant.write_bytes(mutate(original.read_bytes(), rng))
        return mutant
    files = sorted(file for file in original.rglob("*") if file.is_file())
    chosen = rng.choice(files)
    for file in files:
        copy = mutant / file.relative_to(original)
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = file.read_bytes()
        copy.write_bytes(mutate(data, rng) if file == chosen else data)
    return mutant


def read_all(path: Path, format: Format) -> bool:
    """Open and read a file, skipping broken records; return whether all of its first samples could be read."""
    source = penstock.open(path, format=format.name, errors="skip")
    try:
        if isinstance(source, penstock.Stream):
            for _, _ in zip(source, range(MAX_SAMPLES), strict=False):
                pass
            return not source.skipped
        readable = [_is_read(source, index) for index in range(min(len(source), MAX_SAMPLES))]
        return all(readable)
    finally:
        source.close()


def _is_read(source: penstock.Source, index: int) -> bool:
    try:
        source[index]
    except PenstockError:
        return False
    return True


# ── children ────────────────────────────────────────────────────────────────────────────────────────────────


def _read_in_child(
    format: Format, originals: list[Path], folder: Path, first: int, last: int
) -> Iterator[tuple[str, str]]:
    """Yield the outcome of one mutant after another, until one ends the child."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_read_mutants, args=(format, originals, folder, first, last, theirs))
    child.start()
    theirs.close()
    try:
        for _ in range(first, last):
            if not ours.poll(TIMEOUT_S * 2):
                yield "bad", f"hangs, and cannot be interrupted for {TIMEOUT_S * 2:g} s"
                return
            try:
                yield ours.recv()
            except EOFError:
                child.join()
                is_known = -(child.exitcode or 0) in CRASHES.get(format.name, ())
                yield "crashed" if is_known else "bad", f"the process ends with {child.exitcode}"
                return
    finally:
        child.kill()
        child.join()
        ours.close()


class _TooLongError(BaseException):
    pass


def _read_mutants(
    format: Format, originals: list[Path], folder: Path, first: int, last: int, results: Connection
) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries of C write there
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NBYTES, used + MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _on_alarm)
    mine = folder / "mutants"
    for seed in range(first, last):
        rng = Random(f"{format.name} {seed}")
        mine.mkdir(exist_ok=True)
        path = _mutant(rng.choice(originals), mine, rng)
        results.send(_outcome(lambda path=path: read_all(path, format)))  # type: ignore[misc]
        _remove(mine)


def _on_alarm(*_: Any) -> None:
    raise _TooLongError


def _outcome(read: Callable[[], bool]) -> tuple[str, str]:
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
    try:
        return ("read" if read() else "refused"), ""
    except PenstockError:
        return "refused", ""
    except _TooLongError:
        return "bad", f"takes more than {TIMEOUT_S:g} s"
    except BaseException as error:  # noqa: BLE001 - whatever comes out is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "bad", f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
