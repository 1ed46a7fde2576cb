"""Runs one conversion to its end, from the beginning or from where an earlier attempt stopped."""

from __future__ import annotations

import glob
import inspect
import json
import os
import shutil
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

from penstock.core.errors import OptionError, PenstockError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.conversion_plan import ConversionPlan, group_segments, make_plan
from penstock.data.convert.converter_pool import ConverterPool
from penstock.data.convert.numbered_records import SourceSpec, ranges_between
from penstock.data.convert.partial_folder import PartialFolder
from penstock.data.convert.progress import ProgressCounter
from penstock.data.convert.segment_tasks import Written, join_segments, read_checksum, write_segment
from penstock.data.convert.source_contents import read_contents
from penstock.data.convert.source_fingerprint import SourceFingerprint
from penstock.data.convert.target import STATE_NAME, Target
from penstock.data.schema import Errors
from penstock.data.source import Source
from penstock.data.storage.storage import is_remote


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The result of a conversion."""

    samples: int
    files: tuple[str, ...]
    """The files that were written."""
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
    """Whether the result was read again, and has the samples that were read of the source."""


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
        if not os.path.exists(os.path.join(self.target.partial_folder, STATE_NAME)):
            self.target.check_absent(overwrite=overwrite)
        with closing(PartialFolder(self.target.partial_folder, self._settings(fingerprint))) as folder:
            try:
                if "finished" not in folder.state:
                    with closing(ConverterPool(self.workers, self.counter, folder.lock)) as pool:
                        self._write_result(folder, pool, verify=verify)
                done = folder.state["finished"]
                if is_remote(self.target.path):
                    self.counter.begin_stage("uploading", None)
                names = self.target.publish(folder.state["folders"], overwrite=overwrite, verify=done["verified"])
            except PenstockError as error:
                self._keep_progress(error)
                raise
            except OSError as error:
                failure = SourceError(f"{self.target.path} could not be finished: {error}")
                self._keep_progress(failure)
                raise failure from error
        nbytes, seconds = self.target.nbytes(names), time.monotonic() - started
        return Conversion(files=tuple(names), nbytes=nbytes, seconds=seconds, **done)

    def _keep_progress(self, error: PenstockError) -> None:
        """After an error, add a note on the samples that are kept, or remove the folder if there are none."""
        folder = self.target.partial_folder
        written = [Written.load(segment) for segment in glob.glob(f"{glob.escape(folder)}/segment-*")]
        kept = sum(one.checksum.samples for one in written if one is not None)
        if kept:
            error.add_note(f"{kept} samples are kept in {folder}; when the cause is fixed, repeat the call to resume")
        else:  # an empty folder would only block a corrected command with other options
            shutil.rmtree(folder, ignore_errors=True)

    def _settings(self, fingerprint: SourceFingerprint) -> dict[str, Any]:
        settings = {
            **asdict(self.spec),
            "errors": self.errors,
            "target": self.target.kind.name,
            "writer_options": self.writer_options,
            "shards": self.target.shards,
            "shard_size": self.target.shard_nbytes,
            "source_files": asdict(fingerprint),
        }
        try:
            return dict(json.loads(json.dumps(settings)))
        except (TypeError, ValueError) as error:
            raise OptionError(f"options are recorded as JSON, and {error}") from error

    def _write_result(self, folder: PartialFolder, pool: ConverterPool, *, verify: bool) -> None:
        """Write, join and verify the result; it is not renamed yet."""
        plan = self._plan(folder, pool)
        written, resumed = self._write(plan, pool)
        folders, counts = self._join(plan, written, pool)
        if verify:
            self._verify(plan, written, folders, counts, pool)
        checksum = DatasetChecksum.total([one.checksum for one in written])
        skipped = sum(one.skipped for one in written) + plan.contents.truncated_shards
        done = {"samples": checksum.samples, "checksum": checksum.to_text(), "skipped": skipped}
        folder.update(
            folders=list(map(os.path.basename, folders)), finished={**done, "resumed": resumed, "verified": verify}
        )

    def _options_to_read(self) -> dict[str, Any]:
        """Return the options of the writer that the reader of the result needs, too: a delimiter, a dtype."""
        known = inspect.signature(self.target.kind.open_files).parameters
        return {name: value for name, value in self.writer_options.items() if name in known}

    def _plan(self, folder: PartialFolder, pool: ConverterPool) -> ConversionPlan:
        if "plan" in folder.state:
            return ConversionPlan.from_json(folder.state["plan"])
        self._check_first_sample()
        contents = read_contents(self.spec, self.errors, pool, folder.path)
        with closing(self.spec.open()) as source:
            runs = source.chunk_starts if isinstance(source, Source) else None
        plan = make_plan(contents, self.target, runs, self.workers, joins=self.target.kind.concat_files is not None)
        self._raise_if_unsupported(self.target.kind.why_unsupported(plan.schema))
        folder.update(plan=asdict(plan))
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

    def _folder(self, kind: Literal["segment", "file"], number: int) -> str:
        return os.path.join(self.target.partial_folder, f"{kind}-{number:06d}")

    def _write(self, plan: ConversionPlan, pool: ConverterPool) -> tuple[list[Written], int]:
        """Write the segments that are missing; return all, and how many samples were written before."""
        self.counter.begin_stage("writing", sum(plan.contents.counts))
        write = partial(
            write_segment,
            spec=self.spec,
            errors=self.errors,
            schema=plan.schema,
            target=self.target,
            options=self.writer_options,
        )
        calls = [
            partial(
                write,
                ranges=ranges_between(plan.contents.counts, first, stop),
                folder=self._folder("segment", number),
            )
            for number, (first, stop) in enumerate(pairwise(plan.boundaries))
        ]
        results = pool.run("writing segment", calls)
        resumed = sum(written.checksum.samples for written, is_earlier in results if is_earlier)
        return [written for written, _ in results], resumed

    def _join(
        self, plan: ConversionPlan, written: list[Written], pool: ConverterPool
    ) -> tuple[list[str], tuple[int, ...]]:
        """Join segments to files; return their folders, and how many samples each has."""
        self.counter.begin_stage("joining", None)
        groups = group_segments(plan, self.target, [one.file_nbytes for one in written])
        checksums = [DatasetChecksum.total([written[one].checksum for one in group]) for group in groups]
        join = partial(join_segments, target=self.target, options=self._options_to_read())
        calls = [
            partial(
                join,
                folders=[self._folder("segment", one) for one in group],
                folder=self._folder("file", number),
                checksum=checksum,
            )
            for number, (group, checksum) in enumerate(zip(groups, checksums, strict=True))
        ]
        return pool.run("joining file", calls), tuple(checksum.samples for checksum in checksums)

    def _verify(
        self,
        plan: ConversionPlan,
        written: list[Written],
        folders: list[str],
        counts: tuple[int, ...],
        pool: ConverterPool,
    ) -> None:
        """Read the result again, and compare the samples of each segment with those that were written."""
        self.counter.begin_stage("comparing", sum(counts))
        files = list(map(self.target.data_path, folders))
        fields, options = list(plan.schema) or None, self._options_to_read()
        result = SourceSpec(files, self.target.kind.name, fields, options)
        with closing(result.open()) as source:
            counts = (sum(counts),) if isinstance(source, Source) else counts
        expected = [one.checksum for one in written]
        ends = list(accumulate((one.samples for one in expected), initial=0))
        found = pool.run(
            "comparing segment",
            [partial(read_checksum, spec=result, ranges=ranges_between(counts, *both)) for both in pairwise(ends)],
        )
        if self.target.is_ordered(plan.schema):
            differing = [number for number, checksum in enumerate(expected) if found[number] != checksum]
            place = f"samples {ends[differing[0]]} to {ends[differing[0] + 1] - 1}" if differing else ""
        else:
            totals = DatasetChecksum.total(found), DatasetChecksum.total(expected)
            place = "samples" if totals[0].sum != totals[1].sum else ""
        if place:
            raise SourceError(f"{files[0]}: the {place} of the result differ from those of the source")
