"""Causes that one line of the dataset shows: what it opens, asks or looks up again for every sample."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.core.units import size_text
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import SHRINKS, describe_line, gain_without, loading_matters, place_of
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding

_SEARCH = (
    r"\.query\(|\.isin\(|\.groupby\(|\.str\.contains\(|\bin (enumerate\()?self\.\w+\)? if \b|self\.\w+\.index\("
    r"|\b(np|torch)\.(where|nonzero|flatnonzero|argwhere)\(\(?self\b[^,]* == |\bself\.\w+\[\(?self\.[^=]* == "
    r"|(?P<table>\w[\w.]*?)(\.loc)?\[\(?(?P=table)(\.\w+|\[[^\]]*\])( == |\.(eq|between)\()"
    r"| == .* pandas\.core\.(ops|arraylike)\."
)
"""What looks at all rows of a table, or all elements of a list, to find some."""
_LOG = r" logging\.|\b(logg(er|ing)|log|LOG|LOGGER)\.(debug|info|warning|error|log)\("
_JOIN = r"\.merge\(|\.join\(.*pandas\.|\bpd\.(merge|concat)\("


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

    waste: re.Pattern[str] | None = None
    """Of those lines, the ones that do no work on the sample: without them, samples are the same."""

    needs: tuple[str, ...] = ("samples",)
    """The fields of `Measurements` that it needs."""

    def find(self, measured: Measurements) -> Finding | None:
        """Return the finding if such lines take most of a sample's time, or a good part of it for nothing."""
        lines = self._lines(measured)
        fraction = self._fraction(measured)
        if not self._takes_enough(measured) or not loading_matters(measured):
            return None
        if fraction < max(one._fraction(measured) for one in LINE_PATTERNS if one._takes_enough(measured)):
            return None
        return Finding(
            name=self.name,
            cause=self.cause,
            evidence=f"{fraction:.0%} of a sample's time: {'; '.join(map(describe_line, lines))}",
            remedy=self.remedy,
            gain=gain_without(fraction, measured),
        )

    def _takes_enough(self, measured: Measurements) -> bool:
        wasted = [
            line for line in self._lines(measured) if self.waste and self.waste.search(f"{line.line} {line.calls}")
        ]
        return (
            self._fraction(measured) >= THRESHOLDS.line_fraction
            or sum(line.fraction for line in wasted) >= THRESHOLDS.wasted_line_fraction
        )

    def _lines(self, measured: Measurements) -> list[HotLine]:
        return [line for line in required(measured.samples).lines if self.pattern.search(f"{line.line} {line.calls}")]

    def _fraction(self, measured: Measurements) -> float:
        return sum(line.fraction for line in self._lines(measured))


LINE_PATTERNS = (
    LinePattern(
        "logging-per-sample",
        re.compile(_LOG),
        "Every sample writes to a log.",
        "log once per epoch, or count and log the count",
        waste=re.compile(_LOG),
    ),
    LinePattern(
        "database-for-each-sample",
        re.compile(r" sqlite3\.|psycopg|pymysql|\.connect\(|\.execute\(|\.fetch(one|all)\("),
        "Every sample asks a database, or connects to it again.",
        "connect once in each worker, when the dataset is first used, and keep the connection; ask by a key or a "
        "column that has an index, and not by OFFSET, which steps over all rows before",
    ),
    LinePattern(
        "opened-for-each-sample",
        re.compile(
            r" (gzip|bz2|lzma|zipfile|tarfile|h5py|zarr|lmdb|dbm(\.\w+)?|shelve)\.(?!decompress|_hl\.dataset|core\.)"
            r"|\b(gzip|bz2|lzma|tarfile|dbm(\.\w+)?|shelve)\.open\(|ZipFile\(|h5py\.File\("
        ),
        "Every sample opens an archive, a store or a compressed file, and reads through it from its beginning.",
        "open it once in each worker, when the dataset is first used, and keep it; or unpack it once before training",
    ),
    LinePattern(
        "decompressed-for-each-sample",
        re.compile(r"\bdecompress\(| (bz2|zlib|gzip|lzma)\.decompress|\.NpzFile\."),
        "Every sample is decompressed, by a compression that is made for small files and not for speed.",
        "decompress once, before training, and keep what samples read (an .npy file for each, or one array that is "
        "memory-mapped); or compress with lz4 or zstd instead",
    ),
    LinePattern(
        "written-for-each-sample",
        re.compile(
            r"\bos\.fsync\(|\.(flush|write|writelines|writerows?)\(|\bprint\(|\bnp\.save\w*\(|\btorch\.save\("
            r"|\.to_(csv|parquet|pickle|json)\(|\b(pickle|json)\.dump\(|\bopen\([^)]*[\"'][wax]b?t?\+?[\"']"
        ),
        "Every sample writes to a file or to the terminal.",
        "write once per epoch, from the training process; a worker returns what is to be written with its sample",
    ),
    LinePattern(
        "searched-for-each-sample",
        re.compile(_SEARCH),
        "Every sample searches all of the data for what belongs to it.",
        "group the data once, in __init__: self.rows = {key: rows for key, rows in table.groupby(column)}, or a dict "
        "from each key to its positions; then look it up: self.rows[key]",
    ),
    LinePattern(
        "joined-for-each-sample",
        re.compile(_JOIN),
        "Every sample joins tables, and a join looks at all rows of them.",
        "join them once, in __init__: table = left.merge(right, on=...), and take its columns out of it: self.values = "
        "torch.tensor(table[columns].to_numpy()), then self.values[index]",
    ),
    LinePattern(
        "table-row-for-each-sample",
        re.compile(rf"^(?!.*({_SEARCH}|{_JOIN})).*( pandas\.|\.i?loc\[)"),
        "Every sample works on a pandas table, of which each operation makes a new table or Series, also for one row.",
        "do it for the whole table once, in __init__, and take the columns out: self.values = "
        "torch.tensor(table[columns].to_numpy()), then self.values[index]",
    ),
    LinePattern(
        "parsed-for-each-sample",
        re.compile(
            r"\b(json|orjson|ujson|msgpack|pickle|ast|\w*ElementTree|etree|ET)\.(loads|unpackb|literal_eval|fromstring)\("
            # of a list, whose numbers it looks at one by one; a call inside of it would be what takes the time
            r"|\btorch\.(tensor|FloatTensor|LongTensor)\([\w.\[\]\"' ]+(, dtype=[\w.]+)?\).* $"
            r"|\bstr[pf]time\(|\.(fromisoformat|to_datetime|parse_date)\(| (_strptime|dateutil\.parser)\."
        ),
        "Every sample is parsed from text or serialized bytes, or made into a tensor from Python's own numbers, anew.",
        "do it once: in __init__, or once before training, convert all records into arrays or tensors of their "
        "numbers, and index those (text: keep the token ids)",
    ),
    LinePattern(
        "checked-for-each-sample",
        re.compile(
            r"\b(hashlib\.(?!pbkdf2|scrypt)|xxhash\.|zlib\.(crc32|adler32)\b)|\.(hex)?digest\(|\b(md5|sha\d+|crc32|blake2[bs])\("
        ),
        "Every sample is read and hashed, to see whether its data is what it was.",
        "check all files once, before training or when they are copied, and not each time that a sample is read",
    ),
    LinePattern(
        "copied-for-each-sample",
        re.compile(r" copy\.|\bdeepcopy\("),
        "Every sample is a deep copy of Python objects.",
        "copy only what the transform changes, when it changes it: array.copy(), tensor.clone(), dict(record)",
    ),
    LinePattern(
        "appended-for-each-sample",
        re.compile(r"\b(self\.\w+) = (torch|np)\.(append|cat|concat|concatenate|vstack|hstack|stack)\(.*\1\b"),
        "Every sample copies all that the dataset has kept so far, to append itself to it; each worker keeps its own.",
        "keep a list and append to it, or make the array once, at its full size, and write rows; what only grows does "
        "not belong into a worker, whose copy the training process never sees",
    ),
    LinePattern(
        "another-process-for-each-sample",
        re.compile(r" multiprocessing\.(managers|connection)| subprocess\.|\bos\.(system|popen)\("),
        "Every sample starts a program, or asks another process (a multiprocessing.Manager), and waits for its answer.",
        "a program: do what it does in the worker, by a library, or once, before training; a Manager: keep the data in "
        "the dataset itself, in a dict or list that workers only read, an array, or a shared tensor",
        waste=re.compile(r" multiprocessing\.managers\."),  # a program does some work
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
        remedy=f"{place_of(read.line)}: {remedy}",
        gain=gain_without(read.fraction, measured),
    )


@cause("same-for-every-sample", "samples")
def same_for_every_sample(measured: Measurements) -> Finding | None:
    """A line of the dataset computes the same for all samples."""
    lines = [line for line in required(measured.samples).lines if line.is_same_for_all]
    fraction = sum(line.fraction for line in lines)
    if fraction < THRESHOLDS.line_fraction or not loading_matters(measured) or is_known(measured):
        return None
    return Finding(
        name="same-for-every-sample",
        cause="Every sample computes anew what is the same for all of them: nothing of the sample goes into it.",
        evidence=f"{fraction:.0%} of a sample's time: {'; '.join(map(describe_line, lines))}",
        remedy=f"{place_of(lines[0].line)}: compute it once, in __init__, and keep it in an attribute",
        gain=gain_without(fraction, measured),
    )


@cause("reads-more-than-it-keeps", "samples")
def reads_more_than_it_keeps(measured: Measurements) -> Finding | None:
    """A sample reads many times its own size."""
    samples = required(measured.samples)
    kept_nbytes, read_nbytes = samples.batch_nbytes / samples.batch_samples, samples.read_nbytes / samples.samples
    reading = [line for line in samples.lines if _READS.search(f"{line.line} {line.calls}")]
    fraction = sum(line.fraction for line in reading)
    if fraction < THRESHOLDS.line_fraction or not loading_matters(measured) or is_known(measured):
        return None
    has_chunks = any(_CHUNKED.search(line.calls) for line in reading)  # which are decompressed, too
    least_nbytes = 0 if has_chunks else THRESHOLDS.reread_nbytes
    if read_nbytes < max(least_nbytes, THRESHOLDS.reread_factor * kept_nbytes):
        return None
    return Finding(
        name="reads-more-than-it-keeps",
        cause="A sample reads far more than it keeps: whole files or chunks of which it takes a small part.",
        evidence=(
            f"{size_text(int(read_nbytes))} read for a sample of {size_text(int(kept_nbytes))}; {fraction:.0%} of a "
            f"sample's time: {'; '.join(map(describe_line, reading))}"
        ),
        remedy=(
            f"{place_of(reading[0].line)}: "
            + ("write it anew in chunks of about a sample (chunks=(1, ...)), without gzip; or " if has_chunks else "")
            + "read only the part that the sample needs: seek to it, or name it where the reader takes a start and a "
            "length; np.load(..., mmap_mode='r') or torch.load(..., mmap=True), opened once for each file and kept; "
            "penstock.open(...); or chunks of the size of a sample"
        ),
        gain=gain_without(fraction, measured),
        is_uncertain=any(SHRINKS.search(line.line) for line in samples.lines),  # of all that it reads
    )


_READS = re.compile(r"\bload\w*\(|\bread\w*\(|\bopen\w*\(|\bfromfile\(|\[.*\]| (numpy|torch|h5py|zarr|pyarrow)\.")
_CHUNKED = re.compile(r"^(h5py\._hl\.dataset|zarr\.)")


def is_known(measured: Measurements) -> bool:
    """Return whether a line that takes a good part of a sample's time has a name here."""
    return any(pattern.find(measured) for pattern in LINE_PATTERNS) or (
        read_again_for_each_sample.find(measured) is not None
    )


@cause("threads-hold-each-other", "samples")
def threads_hold_each_other(measured: Measurements) -> Finding | None:
    """A sample waits for threads of its own that run Python one at a time."""
    samples = required(measured.samples)
    waits = _waiting_lines(samples.lines)
    if samples.coordination_fraction < THRESHOLDS.line_fraction or not waits or not loading_matters(measured):
        return None
    least_cores = THRESHOLDS.one_core_low * measured.machine.free_fraction  # others slow these threads down
    if not least_cores < samples.other_threads_cores < THRESHOLDS.one_core_high:
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
