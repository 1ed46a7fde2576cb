"""Mutated files through every reader: `python -m benchmarks.fuzz [--count N] [--formats ...] [--json FILE]`.

For each format, small files are written by its own writer, and mutated: bits flipped, bytes overwritten, cut out, put
in, doubled, numbers made extreme, ends cut off. Every mutant is opened and read to its end in a child process, which
may take a gigabyte and ten seconds for it. Only penstock's documented errors may come out of it: anything else, a hang,
too much memory or a crash of the child is printed with the seed that makes it again (`--seed`).
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
from penstock.core.errors import PenstockError
from penstock.feed.sources.formats import FORMATS, Format
from penstock.feed.sources.sample import Field, Sample, Schema, field_of

MEMORY_NBYTES = 1 << 30
SECONDS = 10.0
MOST_SAMPLES = 64
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
class Bad:
    """A mutant that did something else than to be read or refused."""

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
    asked = parser.parse_args()
    began = time.perf_counter()
    formats = [one for one in FORMATS if not asked.formats or one.name in asked.formats]
    rows, bad = [], []
    for one in formats:
        found, wrong = fuzzed(one, asked.seed, max(1, asked.count // len(formats)))
        rows.append({"format": one.name, **found})
        bad += wrong
        print(f"{one.name}: {dict(found)}", file=sys.stderr)
    for each in bad:
        print(f"{each.format}, --seed {each.seed}: {each.what}")
    mutants = sum(sum(row[kind] for kind in ("read", "refused", "bad")) for row in rows)
    if asked.json:
        result = {
            "benchmark": "fuzz",
            "mutants": mutants,
            "rows": rows,
            "bad": [vars(each) for each in bad],
            "seconds": round(time.perf_counter() - began, 1),
        }
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"fuzz: {mutants} mutants of {len(rows)} formats, {len(bad)} bad; {time.perf_counter() - began:.0f} s")
    raise SystemExit(1 if bad else 0)


def fuzzed(format: Format, first: int, count: int) -> tuple[Counter[str], list[Bad]]:
    """Read mutants `first` to `first + count` of a format; return how many were read, refused and bad, and these."""
    counted, bad = Counter(read=0, refused=0, bad=0), []
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        originals = written(format, Path(folder) / "whole")
        seed, last = first, first + count
        while seed < last:
            for outcome, what in _in_a_child(format, originals, Path(folder), seed, last):
                counted[outcome] += 1
                if outcome == "bad":
                    bad.append(Bad(format.name, seed, what))
                seed += 1
    return counted, bad


def written(format: Format, folder: Path) -> list[Path]:
    """Write small whole files of a format; return them, or the folders that they are."""
    folder.mkdir()
    module = format.load()
    found = []
    for number, samples in enumerate(_samples(format.name)):
        path = folder / f"{number}{format.suffixes[0]}"
        if format.name == "images":
            path = folder / str(number)
        if not hasattr(module, "Writer"):
            path.write_bytes(_foreign(format.name))
        else:
            schema: Schema = {name: field_of(value) for name, value in samples[0].items()}
            if format.name == "tokens":
                schema = {"tokens": Field("array", "uint16", (None,))}
            writer = module.Writer(str(path), schema)
            for sample in samples:
                writer.write(sample)
            writer.close()
        found.append(path)
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


def _foreign(format: str) -> bytes:
    if format != "video":
        raise ValueError(f"{format} has no writer, and no file of others' is made for it here")
    import io

    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(20):
            picture = np.full((32, 32, 3), number * 10, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


# ── one mutant ──────────────────────────────────────────────────────────────────────────────────────────────


def mutated(data: bytes, chance: Random) -> bytes:
    """Return `data` with one to four things done to it.

    >>> mutated(b"penstock", Random(1)) == mutated(b"penstock", Random(1)) != b"penstock"
    True
    """
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        size = min(len(changed) - at, 1 << chance.randint(0, 8))
        match chance.randrange(7):
            case 0:
                if at < len(changed):
                    changed[at] ^= 1 << chance.randrange(8)
            case 1:
                odd = chance.choice(_ODD)
                changed[at : at + len(odd)] = odd
            case 2:
                changed[at : at + size] = chance.randbytes(size)
            case 3:
                del changed[at : at + size]
            case 4:
                changed[at:at] = chance.randbytes(size)
            case 5:
                changed[at:at] = changed[at : at + size]
            case _:
                if chance.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


def _mutant(original: Path, folder: Path, chance: Random) -> Path:
    """Write a mutant beside its original, and return it; of a folder, one of its files is mutated."""
    mutant = folder / f"mutant{original.suffix}"
    if original.is_file():
        mutant.write_bytes(mutated(original.read_bytes(), chance))
        return mutant
    files = sorted(file for file in original.rglob("*") if file.is_file())
    chosen = chance.choice(files)
    for file in files:
        copy = mutant / file.relative_to(original)
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = file.read_bytes()
        copy.write_bytes(mutated(data, chance) if file == chosen else data)
    return mutant


def look(path: Path, format: Format) -> bool:
    """Open and read a file, past what is broken; return whether all of some samples could be read."""
    source = penstock.open(path, format=format.name, errors="skip")
    try:
        if isinstance(source, penstock.Stream):
            for _, _ in zip(source, range(MOST_SAMPLES), strict=False):
                pass
            return not source.skipped
        readable = [_is_read(source, index) for index in range(min(len(source), MOST_SAMPLES))]
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


def _in_a_child(
    format: Format, originals: list[Path], folder: Path, first: int, last: int
) -> Iterator[tuple[str, str]]:
    """Yield what became of one mutant after another, until the child is lost to one."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_read_mutants, args=(format, originals, folder, first, last, theirs))
    child.start()
    theirs.close()
    try:
        for _ in range(first, last):
            if not ours.poll(SECONDS * 2):
                yield "bad", f"hangs, and does not let itself be interrupted for {SECONDS * 2:g} s"
                return
            try:
                yield ours.recv()
            except EOFError:
                child.join()
                yield "bad", f"the process ends with {child.exitcode}"
                return
    finally:
        child.kill()
        child.join()
        ours.close()


class _TooLongError(BaseException):
    pass


def _read_mutants(format: Format, originals: list[Path], folder: Path, first: int, last: int, told: Connection) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries of C write there
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NBYTES, used + MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _ring)
    mine = folder / "mutants"
    for seed in range(first, last):
        chance = Random(f"{format.name} {seed}")
        mine.mkdir(exist_ok=True)
        path = _mutant(chance.choice(originals), mine, chance)
        told.send(_outcome(lambda path=path: look(path, format)))  # type: ignore[misc]
        _remove(mine)


def _ring(*_: Any) -> None:
    raise _TooLongError


def _outcome(read: Callable[[], bool]) -> tuple[str, str]:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return ("read" if read() else "refused"), ""
    except PenstockError:
        return "refused", ""
    except _TooLongError:
        return "bad", f"takes more than {SECONDS:g} s"
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
