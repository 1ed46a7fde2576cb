"""Runs one conversion to its end, from the beginning or from where an earlier attempt stopped."""

from __future__ import annotations

import inspect
import os
import shutil
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from penstock.core.errors import PenstockError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.compare_sources import compare_sources
from penstock.data.convert.conversion_plan import ConversionPlan, group_segments, make_plan
from penstock.data.convert.converter_pool import ConverterPool
from penstock.data.convert.journal import Journal
from penstock.data.convert.numbered_records import SourceSpec, record_counts
from penstock.data.convert.progress import ProgressCounter
from penstock.data.convert.segment_tasks import (
    WrittenSegment,
    check_count,
    data_path,
    is_intact,
    join_segments,
    write_segment,
)
from penstock.data.convert.source_contents import read_contents
from penstock.data.convert.source_fingerprint import SourceFingerprint
from penstock.data.convert.target import Target, nbytes_of, remove
from penstock.data.convert.task import Task
from penstock.data.schema import Errors
from penstock.data.source import Source
from penstock.data.storage.storage import is_remote


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The result of a conversion."""

    samples: int
    files: tuple[str, ...]
    """The files that were written, or compared."""
    nbytes: int
    """Of the files."""
    seconds: float
    checksum: str
    """Of the samples, in whatever order: see `canonical_bytes`. Equal for equal samples of any format."""
    skipped: int
    """Broken records that were left out; the unreadable rest of a shard counts as one."""
    resumed: int
    """Samples that an earlier attempt had written."""
    verified: bool
    """Whether the result was read again and compared with the source, sample by sample."""


@dataclass(frozen=True, slots=True)
class ConversionRun:
    """One conversion: plans it, writes segments, joins them to files, verifies and renames these."""

    spec: SourceSpec
    target: Target
    errors: Errors
    workers: int
    """Processes; 0 for none."""
    writer_options: dict[str, Any]
    counter: ProgressCounter

    def __post_init__(self) -> None:
        kind = self.target.kind
        if kind.writer is None:
            raise SourceError(f"{self.target.path}: {kind.name} is read by penstock, and not written")
        kind.check_options(kind.writer, self.writer_options)

    def run(self, fingerprint: SourceFingerprint, *, overwrite: bool, verify: bool, started: float) -> Conversion:
        """Run what is left of the conversion, which began at `started`, in seconds of `time.monotonic`."""
        if not os.path.isdir(self.target.partial_folder):
            self.target.check_absent(overwrite=overwrite)
        with closing(Journal(self.target.partial_folder, self._settings(fingerprint))) as journal:
            try:
                if journal.last("finished") is None:
                    self.target.check_absent(overwrite=overwrite)
                    with closing(ConverterPool(self.workers, journal.lock)) as pool:
                        self._write_result(journal, pool, verify=verify)
                done = journal.last("finished") or {}
                if is_remote(self.target.path):
                    self.counter.begin_stage("uploading", None)
                names = self.target.publish(done["folders"], overwrite=overwrite, verify=done["verified"])
            except PenstockError as error:
                self._keep_progress(journal, error)
                raise
            except OSError as error:
                failure = SourceError(f"{self.target.path} could not be finished: {error}")
                self._keep_progress(journal, failure)
                raise failure from error
        return Conversion(
            samples=done["samples"],
            files=tuple(names),
            nbytes=self.target.nbytes(names),
            seconds=time.monotonic() - started,
            checksum=done["checksum"],
            skipped=done["skipped"],
            resumed=done["resumed"],
            verified=done["verified"],
        )

    def _keep_progress(self, journal: Journal, error: PenstockError) -> None:
        """After an error, add a note on the samples that are kept, or remove the folder if there are none."""
        written = {entry["number"]: entry["checksum"]["samples"] for entry in journal.all("segment_written")}
        kept = sum(written.values())
        if kept:
            error.add_note(
                f"{kept} samples are kept in {self.target.partial_folder}; when the cause is fixed, repeat the "
                "call to resume"
            )
        else:  # an empty folder would only block a corrected command with other options
            shutil.rmtree(self.target.partial_folder, ignore_errors=True)

    def _settings(self, fingerprint: SourceFingerprint) -> dict[str, Any]:
        spec, target = self.spec, self.target
        return {
            "source": spec.path,
            "format": spec.format,
            "fields": spec.fields,
            "options": spec.options,
            "errors": self.errors,
            "target": target.kind.name,
            "writer_options": self.writer_options,
            "shards": target.shards,
            "shard_size": target.shard_nbytes,
            "source_files": asdict(fingerprint),
        }

    def _write_result(self, journal: Journal, pool: ConverterPool, *, verify: bool) -> None:
        """Write, join and verify the result; it is not renamed yet."""
        plan = self._plan(journal, pool)
        written, resumed = self._write(plan, journal, pool)
        folders, counts = self._join(plan, written, journal, pool)
        files = tuple(data_path(folder, self.target.suffix) for folder in folders)
        options = self._options_to_read()
        result = SourceSpec.create(
            files, format=self.target.kind.name, fields=list(plan.schema) or None, options=options
        )
        skipped = sum(one.skipped for one in written) + plan.truncated_shards
        if verify:
            self.counter.begin_stage("comparing", sum(counts))
            compare_sources(
                self.spec,
                result,
                plan.counts,
                record_counts(result, counts),
                pool,
                self.counter,
                errors=self.errors,
                same_numbers=not skipped,
                is_ordered=self.target.is_ordered(plan.schema),
            )
        checksum = DatasetChecksum()
        for one in written:
            checksum.merge(one.checksum)
        journal.append(
            "finished",
            folders=[os.path.basename(folder) for folder in folders],
            samples=checksum.samples,
            checksum=checksum.to_text(),
            skipped=skipped,
            resumed=resumed,
            verified=verify,
        )

    def _options_to_read(self) -> dict[str, Any]:
        """Return the options of the writer that the reader of the result needs, too: a delimiter, a dtype."""
        known = inspect.signature(self.target.kind.open_files).parameters
        return {name: value for name, value in self.writer_options.items() if name in known}

    def _plan(self, journal: Journal, pool: ConverterPool) -> ConversionPlan:
        entry = journal.last("planned")
        if entry is not None:
            return ConversionPlan.from_json(entry)
        self._check_first_sample()
        contents = read_contents(self.spec, self.errors, pool, self.workers, self.counter, journal)
        self._raise_if_unsupported(self.target.kind.why_unsupported(contents.schema))
        with closing(self.spec.open()) as source:
            runs = source.chunk_starts if isinstance(source, Source) else None
        plan = make_plan(contents, self.target, runs, self.workers, joins=self.target.kind.concat_files is not None)
        journal.append("planned", **asdict(plan))
        return plan

    def _check_first_sample(self) -> None:
        """Check whether the format supports the first sample, before all samples are scanned."""
        with closing(self.spec.open()) as source:
            try:
                schema = source.schema
            except SourceError:  # the scan raises it with its place
                return
        wide = {name: replace(field, shape=(None,) * len(field.shape)) for name, field in schema.items()}
        if self.target.kind.why_unsupported(wide):
            self._raise_if_unsupported(self.target.kind.why_unsupported(schema))

    def _raise_if_unsupported(self, reason: str) -> None:
        if reason:
            raise SourceError(
                f"{self.target.path}: {reason}; choose or rename fields with fields= (--fields a,new=old)"
            )

    # ── segments ────────────────────────────────────────────────────────────────────────────────────────────

    def _folder(self, kind: Literal["segment", "file"], number: int) -> str:
        return os.path.join(self.target.partial_folder, f"{kind}-{number:06d}")

    def _write(self, plan: ConversionPlan, journal: Journal, pool: ConverterPool) -> tuple[list[WrittenSegment], int]:
        """Write the segments that are missing; return all, and how many samples were written before."""
        written = self._intact_segments(plan, journal, pool)
        resumed = sum(one.checksum.samples for one in written.values())
        self.counter.begin_stage("writing", plan.counts.total, resumed)
        tasks = [
            Task(
                "writing segment",
                number,
                partial(
                    write_segment,
                    number=number,
                    spec=self.spec,
                    ranges=plan.counts.ranges(plan.boundaries[number], plan.boundaries[number + 1]),
                    errors=self.errors,
                    schema=plan.schema,
                    format=self.target.kind.name,
                    options=self.writer_options,
                    folder=self._folder("segment", number),
                    suffix=self.target.suffix,
                ),
            )
            for number in range(plan.segments)
            if number not in written
        ]
        for _, one in pool.run(tasks, self.counter):
            written[one.number] = one
            journal.append("segment_written", **asdict(one))
        return [written[number] for number in range(plan.segments)], resumed

    def _intact_segments(
        self, plan: ConversionPlan, journal: Journal, pool: ConverterPool
    ) -> dict[int, WrittenSegment]:
        """Return the segments whose files are what the journal recorded; remove all other files."""
        recorded = {entry["number"]: WrittenSegment.from_json(entry) for entry in journal.all("segment_written")}
        kept = {"journal.jsonl", "lock"}
        joined: set[int] = set()
        if len(recorded) == plan.segments:
            for number, group in enumerate(self._groups(plan, [recorded[one] for one in range(len(recorded))])):
                if self._is_joined(number, journal):
                    joined.update(group)
                    kept.add(os.path.basename(self._folder("file", number)))
        checks = [
            Task(
                "checking segment",
                number,
                partial(is_intact, folder=self._folder("segment", number), written=one),
            )
            for number, one in recorded.items()
            if number not in joined
        ]
        intact = {number: recorded[number] for number in joined}
        for task, is_unchanged in pool.run(checks, self.counter):
            if is_unchanged:
                intact[task.number] = recorded[task.number]
                kept.add(os.path.basename(self._folder("segment", task.number)))
        for name in set(os.listdir(self.target.partial_folder)) - kept:
            remove(os.path.join(self.target.partial_folder, name))
        return intact

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────

    def _groups(self, plan: ConversionPlan, written: list[WrittenSegment]) -> list[range]:
        return group_segments(plan, self.target, [one.file_nbytes for one in written])

    def _is_joined(self, number: int, journal: Journal) -> bool:
        path = self._folder("file", number)
        sizes = [entry["nbytes"] for entry in journal.all("file_joined") if entry["number"] == number]
        return bool(sizes) and os.path.exists(path) and nbytes_of(path) == sizes[-1]

    def _join(
        self, plan: ConversionPlan, written: list[WrittenSegment], journal: Journal, pool: ConverterPool
    ) -> tuple[list[str], tuple[int, ...]]:
        """Join segments to files; return their folders, and how many samples each has."""
        groups = self._groups(plan, written)
        counts = tuple(sum(written[number].checksum.samples for number in group) for group in groups)
        folders = [
            self._folder("segment", group[0]) if len(group) == 1 else self._folder("file", number)
            for number, group in enumerate(groups)
        ]
        self.counter.begin_stage("joining", None)
        tasks = [
            Task(
                "joining file",
                number,
                partial(
                    join_segments,
                    format=self.target.kind.name,
                    folders=[self._folder("segment", one) for one in group],
                    folder=self._folder("file", number),
                    suffix=self.target.suffix,
                ),
            )
            for number, group in enumerate(groups)
            if len(group) > 1 and not self._is_joined(number, journal)
        ]
        for task, nbytes in pool.run(tasks, self.counter):
            journal.append("file_joined", number=task.number, nbytes=nbytes)
        for one in (one for group in groups if len(group) > 1 for one in group):
            shutil.rmtree(self._folder("segment", one), ignore_errors=True)
        count_all = partial(check_count, format=self.target.kind.name, options=self._options_to_read())
        paths = [data_path(folder, self.target.suffix) for folder in folders]
        checks = [
            Task("counting samples of file", number, partial(count_all, path=path, expected=count))
            for number, (path, count) in enumerate(zip(paths, counts, strict=True))
        ]
        for _ in pool.run(checks, self.counter):
            pass
        return folders, counts
