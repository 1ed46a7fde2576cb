"""Causes that one line of the dataset shows: what it opens, asks or looks up again for every sample."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import describe_line, loading_matters
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding


@dataclass(frozen=True, slots=True)
class LinePattern:
    """A call that is cheap once and dear for every sample."""

    name: str
    """Of the finding."""

    pattern: re.Pattern[str]
    """Of the line's text and the library function that it calls."""

    cause: str
    """What the finding states."""

    remedy: str
    """What to change."""

    def find(self, measured: Measurements) -> Finding | None:
        """Return the finding if such lines take most of a sample's time."""
        samples = required(measured.samples)
        lines = [line for line in samples.lines if self.pattern.search(f"{line.line} {line.calls}")]
        fraction = sum(line.fraction for line in lines)
        if fraction < THRESHOLDS.line_fraction or not loading_matters(measured):
            return None
        return Finding(
            name=self.name,
            cause=self.cause,
            evidence=f"{fraction:.0%} of a sample's time: {'; '.join(map(describe_line, lines))}",
            remedy=self.remedy,
            gain=_gain_without(fraction),
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of `Measurements` that it needs."""
        return ("samples",)


def _gain_without(fraction: float) -> float | None:
    """Return how much faster samples are without their lines, if that is not beyond what an estimate can tell."""
    return 1 / (1 - fraction) if fraction < THRESHOLDS.estimated_fraction else None


LINE_PATTERNS = (
    LinePattern(
        "logging-per-sample",
        re.compile(r" logging\.|\b(logg(er|ing)|log|LOG|LOGGER)\.(debug|info|warning|error|log)\("),
        "Every sample writes to a log.",
        "log once per epoch, or count and log the count",
    ),
    LinePattern(
        "database-for-each-sample",
        re.compile(r" sqlite3\.|psycopg|pymysql|\.connect\(|\.execute\(|\.fetch(one|all)\("),
        "Every sample asks a database, or connects to it again.",
        "connect once in each worker, when the dataset is first used, and keep the connection; give the column that is "
        "asked for an index",
    ),
    LinePattern(
        "opened-for-each-sample",
        re.compile(
            r" (gzip|bz2|lzma|zipfile|tarfile|h5py|zarr|lmdb)\."
            r"|\b(gzip|bz2|lzma|tarfile)\.open\(|ZipFile\(|h5py\.File\("
        ),
        "Every sample opens an archive or a compressed file, and reads through it from its beginning.",
        "open it once in each worker, when the dataset is first used, and keep it; or unpack it once before training",
    ),
    LinePattern(
        "table-row-for-each-sample",
        re.compile(r" pandas\.|\.i?loc\["),
        "Every sample takes a row out of a pandas table, which makes a new Series of it each time.",
        "take the columns out once, in __init__: self.values = torch.tensor(table[columns].to_numpy()), then "
        "self.values[index]",
    ),
    LinePattern(
        "another-process-for-each-sample",
        re.compile(r" multiprocessing\.(managers|connection)"),
        "Every sample asks another process (a multiprocessing.Manager), which answers one question at a time.",
        "keep the data in the dataset itself: a dict or list that workers only read, an array, or a shared tensor",
    ),
)


@cause("read-again-for-each-sample", "samples")
def read_again_for_each_sample(measured: Measurements) -> Finding | None:
    """Every sample reads the same file, or lists the same folder, and takes a small part of it."""
    samples = required(measured.samples)
    read = samples.repeated_read
    if read is None or read.fraction < THRESHOLDS.line_fraction or not loading_matters(measured):
        return None
    if any(pattern.find(measured) for pattern in LINE_PATTERNS):  # which know better what it is
        return None
    if read.is_folder:
        what, remedy = "lists the same folder", "list it once, in __init__, and keep the names"
    else:
        what = "reads the same file"
        remedy = (
            "read it once, in __init__, and keep what a sample needs; a large array: np.load(..., mmap_mode='r') or "
            "torch.load(..., mmap=True), once; rows of text: penstock.open(...)"
        )
    return Finding(
        name="read-again-for-each-sample",
        cause=f"Every sample {what} again: {read.name}.",
        evidence=f"{read.fraction:.0%} of a sample's time, in each of {read.samples} samples: {read.line}",
        remedy=f"{read.line.partition(': ')[0]}: {remedy}",
        gain=_gain_without(read.fraction),
    )


@cause("threads-hold-each-other", "samples")
def threads_hold_each_other(measured: Measurements) -> Finding | None:
    """A sample waits for threads of its own that run Python one at a time."""
    samples = required(measured.samples)
    waits = _waiting_lines(samples.lines)
    if samples.coordination_fraction < THRESHOLDS.line_fraction or not waits or not loading_matters(measured):
        return None
    machine = measured.machine
    free_fraction = max(0.2, 1 - (machine.others_cores or 0.0) / machine.cores)  # others slow these threads down
    if not THRESHOLDS.one_core_low * free_fraction < samples.other_threads_cores < THRESHOLDS.one_core_high:
        return None
    return Finding(
        name="threads-hold-each-other",
        cause="A sample waits for threads that it starts, and they run one at a time: Python's lock lets one through.",
        evidence=(
            f"{samples.coordination_fraction:.0%} of a sample's time is waiting for other threads, which together use "
            f"{samples.other_threads_cores:.1f} cores meanwhile; {describe_line(waits[0])}"
        ),
        remedy="do the work in the sample's own thread, without a pool, and let worker processes run side by side",
    )


def _waiting_lines(lines: tuple[HotLine, ...]) -> list[HotLine]:
    return [line for line in lines if re.match(r"(threading|concurrent|queue|multiprocessing\.pool)", line.calls)]
