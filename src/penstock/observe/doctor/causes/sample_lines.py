"""Causes that the lines of samples show: by the library function that they call, by what they read, by their time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.bottleneck import MEANING, REMEDY
from penstock.observe.doctor.causes.cause import ask, cause, required
from penstock.observe.doctor.causes.evidence import (
    OF_SAMPLES,
    describe_line,
    gain_without,
    loading_matters,
    loading_parts_s,
    place_of,
)
from penstock.observe.doctor.causes.samples import cold_reads, full_size_decode, slow_samples
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.record.finding import Finding

_SAMPLER_START_S = 0.01
"""Seconds: a shuffle of torch's takes less, for a hundred thousand samples; a good part of a tiny epoch."""


@dataclass(frozen=True, slots=True)
class LinePattern:
    """Functions of libraries that are cheap once and dear for every sample."""

    name: str
    """Of the finding."""

    pattern: re.Pattern[str]
    """Of the library function that a line was seen to call, with its module."""

    cause: str
    """What the finding states."""

    remedy: str
    """What to change."""

    is_waste: bool = False
    """Whether it does no work on the sample: without it, samples are the same."""

    is_of_a_file: bool = False
    """Whether it may be that of a file which each sample reads again: then that says more."""

    needs: tuple[str, ...] = ("samples",)
    """The fields of `Measurements` that it needs."""

    def find(self, measured: Measurements) -> Finding | None:
        """Return the finding if such lines take most of a sample's time, or a good part of it for nothing."""
        lines = self._lines(measured)
        fraction = sum(line.fraction for line in lines)
        least = thresholds.WASTED_FRACTION if self.is_waste else thresholds.LINE_FRACTION
        if fraction < least or not loading_matters(measured):
            return None
        if self.is_of_a_file and read_again_for_each_sample.find(measured) is not None:
            return None
        if any(sum(line.fraction for line in one._lines(measured)) > fraction for one in LINE_PATTERNS):
            return None
        return Finding(
            name=self.name,
            cause=self.cause,
            evidence=f"{fraction:.0%} of a sample's time: {'; '.join(map(describe_line, lines))}",
            remedy=f"{place_of(lines[0].line)}: {self.remedy}",
            gain=gain_without(fraction, measured),
        )

    def _lines(self, measured: Measurements) -> list[HotLine]:
        return [line for line in required(measured.samples).lines if self.pattern.match(line.calls)]


LINE_PATTERNS = (
    LinePattern(
        "logging-per-sample",
        re.compile(r"logging\b"),
        "Every sample writes to a log.",
        "log once per epoch, or count and log the count",
        is_waste=True,
    ),
    LinePattern(
        "opened-for-each-sample",
        re.compile(r"(gzip|bz2|lzma|zipfile|tarfile|h5py|zarr|lmdb|dbm|shelve)\b(?!\._hl\.dataset|\.core\b)"),
        "Every sample opens an archive, a store or a compressed file, and reads through it from its beginning.",
        "open it once in each worker, when the dataset is first used, and keep it; or unpack it once before training",
    ),
    LinePattern(
        "table-row-for-each-sample",
        re.compile(r"pandas\b"),
        "Every sample works on a pandas table, of which each operation looks at all rows, or makes a new table.",
        "do it for the whole table once, in __init__ (group it by what is looked up), and take the columns out: "
        "self.values = torch.tensor(table[columns].to_numpy()), then self.values[index]",
        is_of_a_file=True,
    ),
    LinePattern(
        "parsed-for-each-sample",
        re.compile(r"(json|_strptime|dateutil|xml|yaml|ast|csv)\b"),
        "Every sample is parsed from text, anew.",
        "do it once: in __init__, or once before training, convert all records into arrays or tensors of their "
        "numbers, and index those (text: keep the token ids)",
        is_of_a_file=True,
    ),
    LinePattern(
        "copied-for-each-sample",
        re.compile(r"copy\b"),
        "Every sample is a deep copy of Python objects.",
        "copy only what the transform changes, when it changes it: array.copy(), tensor.clone(), dict(record)",
    ),
    LinePattern(
        "another-process-for-each-sample",
        re.compile(r"(multiprocessing\.(managers|connection)|subprocess)\b"),
        "Every sample starts a program, or asks another process (a multiprocessing.Manager), and waits for its answer.",
        "a program: do what it does in the worker, by a library, or once, before training; a Manager: keep the data in "
        "the dataset itself, in a dict or list that workers only read, an array, or a shared tensor",
        is_waste=True,
    ),
)


@cause("read-again-for-each-sample", "samples")
def read_again_for_each_sample(measured: Measurements) -> Finding | None:
    """Every sample reads the same file, or lists the same folder, and takes a small part of it."""
    read = required(measured.samples).repeated_read
    if read is None or read.fraction < thresholds.LINE_FRACTION or not loading_matters(measured):
        return None
    if any(pattern.find(measured) for pattern in LINE_PATTERNS if not pattern.is_of_a_file):  # which know better
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
        evidence=f"in each of {read.samples} samples, in a function that takes {read.fraction:.0%} of a sample's time: "
        f"{read.line}",
        remedy=f"{place_of(read.line)}: {remedy}",
    )


def is_known(measured: Measurements) -> bool:
    """Return whether a line that takes a good part of a sample's time has a name here."""
    return any(pattern.find(measured) for pattern in LINE_PATTERNS) or (
        read_again_for_each_sample.find(measured) is not None
    )


@cause("costly-line", "samples")
def costly_line(measured: Measurements) -> Finding | None:
    """A few lines of the dataset take most of a sample's time, and samples are what the loop waits for."""
    made, parts = required(measured.samples), loading_parts_s(measured)
    lines = made.lines
    if not lines or made.median_s < thresholds.COSTLY_SAMPLE_S or not loading_matters(measured):
        return None
    is_one = lines[0].fraction >= thresholds.MOST_FRACTION
    of_samples_s = sum(parts.get(part, 0.0) for part in OF_SAMPLES)
    if not is_one and sum(line.fraction for line in lines) < thresholds.MOST_FRACTION:
        return None
    better_known = (full_size_decode, slow_samples, cold_reads)
    if of_samples_s < thresholds.MOST_FRACTION * sum(parts.values()) or is_known(measured):
        return None
    if any(ask(one, measured) for one in better_known):
        return None
    part = max(OF_SAMPLES, key=lambda one: parts.get(one, 0.0))
    shown = lines[:1] if is_one else lines
    return Finding(
        name="costly-line",
        cause=f"{'One line takes' if is_one else 'A few lines take'} most of the time of every sample.",
        evidence="of a sample's time: " + "; ".join(f"{line.fraction:.0%} in {describe_line(line)}" for line in shown),
        remedy=f"{place_of(lines[0].line) if is_one else 'these lines'}: {REMEDY[part]}",
    )


@cause("costly-sampler", "samples")
def costly_sampler(measured: Measurements) -> Finding | None:
    """The sampler takes most of the time to make a batch."""
    made, parts = required(measured.samples), loading_parts_s(measured)
    if parts.get("sampler", 0.0) < thresholds.LINE_FRACTION * sum(parts.values()) or not loading_matters(measured):
        return None
    return Finding(
        name="costly-sampler",
        cause="The sampler takes most of the time to make a batch, and the step waits: no worker does it.",
        evidence=(
            f"{MEANING['sampler']}, takes {made.sampler_s * 1e3:.1f} ms for a batch, making its samples "
            f"{made.batch_s * 1e3:.1f} ms{_longest_called(measured)}"
        ),
        remedy=REMEDY["sampler"],
        gain=gain_without(1.0, measured, ("sampler",)),
    )


@cause("costly-sampler-start", "samples", "as_is")
def costly_sampler_start(measured: Measurements) -> Finding | None:
    """The sampler works before it gives the first index, as one that makes all samples to sort them by length."""
    start_s, own = required(measured.samples).sampler_start_s, measured.settings
    epoch_s = start_s + (own.length or math.inf) * (required(measured.as_is).batch_s or math.inf)
    if start_s < max(_SAMPLER_START_S, thresholds.STARTUP_FRACTION * epoch_s):
        return None
    return Finding(
        name="costly-sampler-start",
        cause="The sampler works for a good part of every epoch before it gives the first index, and the loop waits.",
        evidence=f"its start takes {start_s * 1e3:.0f} ms, an epoch of {own.length} batches {epoch_s * 1e3:.0f} ms",
        remedy=(
            "compute what it needs of the dataset once, in its __init__ (lengths, weights, groups; kept in a file if "
            "it takes long), and only shuffle in __iter__"
        ),
    )


@cause("costly-collate", "samples")
def costly_collate(measured: Measurements) -> Finding | None:
    """The program's own collate function takes most of the time to make a batch."""
    made, parts = required(measured.samples), loading_parts_s(measured)
    if measured.settings.collates_by_default or not loading_matters(measured):
        return None
    fraction = made.collate_s / max(1e-9, made.batch_s)
    if fraction < thresholds.MOST_FRACTION or parts["collate"] < max(parts.values()):
        return None
    return Finding(
        name="costly-collate",
        cause="The program's own collate_fn takes most of the time to make a batch.",
        evidence=(
            f"collating takes {made.collate_s * 1e3:.1f} ms per batch, {fraction:.0%} of the time to make it"
            + _longest_called(measured) * (not measured.settings.num_workers)
        ),
        remedy=(
            "in collate_fn, handle whole arrays and no single numbers: torch.stack(tensors), "
            "torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), torch.from_numpy(numpy.stack(arrays)); what "
            "concerns one sample belongs into __getitem__"
        ),
        gain=gain_without(fraction, measured, (*OF_SAMPLES, "collate")),
    )


def _longest_called(measured: Measurements) -> str:
    lines = measured.called_lines[:1]
    return "".join(f"; outside of the dataset, most time passes in {describe_line(line)}" for line in lines)
