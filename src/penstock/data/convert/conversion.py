"""`penstock.convert`: writes the samples of one data set in another format."""

from __future__ import annotations

import glob
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from penstock.core.errors import OptionError, PenstockError, RecordError, SourceError
from penstock.core.host import usable_cores
from penstock.core.units import to_nbytes
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.partial_folder import PartialFolder, Written
from penstock.data.convert.records import (
    Contents,
    SourceSpec,
    ranges_between,
    read_contents,
    read_records,
    source_files,
)
from penstock.data.convert.remote_target import RemoteTarget
from penstock.data.convert.target import STATE_NAME, Target
from penstock.data.convert.workers import WorkerPool
from penstock.data.convert.written_files import check_file, write_file
from penstock.data.schema import Errors, Sample
from penstock.data.select_format import select_format
from penstock.data.storage.storage import Storage, is_remote

_SMALL_NBYTES = 4 << 20
_READ_NBYTES = 4 << 20
"""Of the samples that a worker reads at a time for a file that this process writes."""
_MAX_FILES = 1_000_000

Stage = Literal["scanning", "writing", "comparing", "uploading"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a conversion is."""

    stage: Stage
    samples: int
    total: int | None
    """None until the number of samples is known."""
    nbytes: int
    """Of the samples that this stage has processed."""


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


def convert(
    src: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,
    to: str | None = None,
    fields: Mapping[str, str] | list[str] | tuple[str, ...] | None = None,
    workers: int | None = None,
    shards: int | None = None,
    shard_size: int | str | None = None,
    overwrite: bool = False,
    errors: Errors = "raise",
    options: Mapping[str, Any] | None = None,
    writer_options: Mapping[str, Any] | None = None,
    verify: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Write the samples of `src` to `dst`, in another format; read from there, they are equal bit by bit.

    Processes write its files to the folder `dst`.partial: after a kill, the same call goes on with those that are
    missing. Where there are fewer files than processes these read for them, if the source's samples have numbers. The
    result is renamed to `dst` when it is complete. Samples that the format does not support raise before any writing.
    For a remote `dst` that folder lies in the user's cache folder (XDG_CACHE_HOME, or ~/.cache), and the complete
    result is uploaded from there; formats that are folders of files (images, Zarr) are refused.

    Args:
        src: as for `penstock.open`.
        dst: a file or folder of this machine, or a URL of s3://, gs:// or az://; many files with braces, as in
            out-{000..015}.tar, or with `shards` or `shard_size`.
        format: of `src`; recognized by its name where it is None.
        to: the format of `dst`; recognized by its name where it is None.
        fields: which fields to write: names, or {new name: name in `src`}.
        workers: processes; 0 converts in this process; None uses one per usable core, and none for a few megabytes.
        shards: how many files to write, as in out-000000.tar.
        shard_size: about the bytes of samples in each of many files: a number, or as in "256MiB".
        overwrite: replace what is at `dst` when the result is complete.
        errors: "raise" for the first broken record, or "skip" to leave them out, counted.
        options: of `src`'s format; see its module. All tokens are written, in parts where no documents are known,
            unless one of them is `pack=True`.
        writer_options: of `dst`'s format.
        verify: read the result again, and compare the checksums and the order of its samples with what was read of
            `src`.
        progress: called several times a second.

    Raises:
        SourceError: `src` does not exist, the format does not support it, `dst` exists, or a disk is full.
        RecordError: a record is broken.
        OptionError: the options contradict each other.
        ExtraError: a package is missing; the message names the extra that brings it.

    Example:
        >>> import pathlib
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "in.jsonl").write_text('{"x": 1, "y": "a"}')
        ...     done = convert(f"{folder}/in.jsonl", f"{folder}/out.csv", fields={"label": "y"})
        ...     print(done.samples, pathlib.Path(folder, "out.csv").read_text().split())
        1 ['label', '"a"']
    """
    started = time.monotonic()
    if errors not in ("raise", "skip"):
        raise OptionError(f"errors={errors!r} is neither 'raise' nor 'skip'")
    path = os.fspath(src) if isinstance(src, str | os.PathLike) else [os.fspath(one) for one in src]
    shard_nbytes = None if shard_size is None else to_nbytes("shard_size", shard_size)
    target_class = RemoteTarget if is_remote(os.fspath(dst)) else Target
    target = target_class.parse(os.fspath(dst), format=to, shards=shards, shard_nbytes=shard_nbytes)
    if fields is not None:
        fields = dict(fields) if isinstance(fields, Mapping) else list(fields)
    storage = Storage()
    kind, paths = select_format(path, format, storage)
    spec = SourceSpec(path, format, fields, {**kind.lossless_options, **(options or {})})
    found = source_files(kind, paths, storage)
    if workers is None:
        workers = 0 if found["nbytes"] < _SMALL_NBYTES else usable_cores()
    if workers < 0:
        raise OptionError(f"workers={workers} has to be 0 or more")
    _check_separate(storage.expand(path), target)
    run = _Run(spec, target, errors, workers, dict(writer_options or {}), progress)
    done = run.run(found, overwrite=overwrite, verify=verify)
    return replace(done, seconds=time.monotonic() - started)


def _check_separate(paths: list[str], target: Target) -> None:
    """Check that the target is not the source, and not in it."""
    names = {target.path, *target.names(1 if target.is_numbered else target.shards or 1), *target.existing_files()}
    written = {_real(name): name for name in names}
    for one in paths:
        source = _real(one)
        for real, name in written.items():
            if real == source or real.startswith(source + ("/" if is_remote(source) else os.sep)):
                raise SourceError(f"{name} is in the source {one}; write elsewhere")


def _real(path: str) -> str:
    return path.rstrip("/") if is_remote(path) else os.path.realpath(path)


class _Run:
    """One conversion: plans it, writes files, verifies and renames these."""

    def __init__(
        self,
        spec: SourceSpec,
        target: Target,
        errors: Errors,
        workers: int,
        writer_options: dict[str, Any],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        kind = target.kind
        if kind.writer is None:
            raise SourceError(f"{target.path}: {kind.name} is read by penstock, and not written")
        kind.check_options(kind.writer, writer_options)
        self._spec, self._target, self._errors, self._workers = spec, target, errors, workers
        self._writer_options = writer_options
        self._progress = progress
        self._now = Progress(stage="scanning", samples=0, total=None, nbytes=0)

    def run(self, found: dict[str, Any], *, overwrite: bool, verify: bool) -> Conversion:
        """Run what is left of the conversion of the files that were `found`."""
        target = self._target
        if not os.path.exists(os.path.join(target.partial_folder, STATE_NAME)):
            target.check_absent(overwrite=overwrite)
        with closing(PartialFolder(target.partial_folder, self._settings(found))) as folder:
            try:
                if "finished" not in folder.state:
                    with closing(WorkerPool(self._workers, self._report, folder.lock)) as pool:
                        self._write_result(folder, pool, verify=verify)
                done = folder.state["finished"]
                if is_remote(target.path):
                    self._begin("uploading", None)
                folders = [os.path.basename(self._folder(number)) for number in range(folder.state["files"])]
                names = target.publish(folders, overwrite=overwrite, verify=done["verified"])
            except PenstockError as error:
                self._keep_files(error)
                raise
            except OSError as error:
                failure = SourceError(f"{target.path} could not be finished: {error}")
                self._keep_files(failure)
                raise failure from error
        return Conversion(files=tuple(names), nbytes=target.nbytes(names), seconds=0.0, **done)

    def _begin(self, stage: Stage, total: int | None) -> None:
        self._now = Progress(stage=stage, samples=0, total=total, nbytes=0)
        self._report(0, 0)

    def _report(self, samples: int, nbytes: int) -> None:
        now = self._now = replace(self._now, samples=self._now.samples + samples, nbytes=self._now.nbytes + nbytes)
        if self._progress is not None:
            self._progress(now)

    def _keep_files(self, error: PenstockError) -> None:
        """After an error, add a note on the samples that are kept, or remove the folder if there are none."""
        folder = self._target.partial_folder
        written = [Written.load(file) for file in glob.glob(f"{glob.escape(folder)}/file-*")]
        kept = sum(one.checksum.samples for one in written if one is not None)
        if kept:
            error.add_note(f"{kept} samples are kept in {folder}; when the cause is fixed, repeat the call to resume")
        else:  # an empty folder would only block a corrected command with other options
            shutil.rmtree(folder, ignore_errors=True)

    def _settings(self, found: dict[str, Any]) -> dict[str, Any]:
        settings = {
            **asdict(self._spec),
            "errors": self._errors,
            "target": self._target.kind.name,
            "writer_options": self._writer_options,
            "shards": self._target.shards,
            "shard_size": self._target.shard_nbytes,
            "source_files": found,
        }
        try:
            return dict(json.loads(json.dumps(settings)))
        except (TypeError, ValueError) as error:
            raise OptionError(f"options are recorded as JSON, and {error}") from error

    def _write_result(self, folder: PartialFolder, pool: WorkerPool, *, verify: bool) -> None:
        """Write and verify the files; they are not renamed yet."""
        contents = self._contents(folder, pool)
        assert contents.schema is not None
        total = sum(contents.counts)
        files = self._target.shards or -(-contents.nbytes // (self._target.shard_nbytes or 1))
        files = min(max(1, files), max(1, total) if self._target.shards is None else files, _MAX_FILES)
        ends = [*pairwise(total * number // files for number in range(files + 1))]
        self._begin("writing", total)
        write = partial(
            write_file,
            spec=self._spec,
            errors=self._errors,
            schema=contents.schema,
            target=self._target,
            options=self._writer_options,
        )
        calls = [
            partial(write, ranges=ranges_between(contents.counts, *both), folder=self._folder(number))
            for number, both in enumerate(ends)
        ]
        if files < pool.count and contents.has_numbers:
            results = [
                call(pool.context, records=self._read_ahead(contents, *both, pool))
                for call, both in zip(calls, ends, strict=True)
            ]
        else:
            results = pool.run("writing file", calls)
        written = [one for one, _ in results]
        if verify:
            self._verify(contents, written, pool)
        checksum = DatasetChecksum.total([one.checksum for one in written])
        done = {
            "samples": checksum.samples,
            "checksum": checksum.to_text(),
            "skipped": sum(one.skipped for one in written) + contents.truncated_shards,
            "resumed": sum(one.checksum.samples for one, is_earlier in results if is_earlier),
            "verified": verify,
        }
        folder.update(files=files, finished=done)

    def _read_ahead(
        self, contents: Contents, first: int, stop: int, pool: WorkerPool
    ) -> Iterator[Sample | RecordError]:
        """Yield records that workers read, in their order."""
        count = max(1, _READ_NBYTES * sum(contents.counts) // max(1, contents.nbytes))
        read = partial(read_records, spec=self._spec, errors=self._errors)
        calls = [
            partial(read, ranges=ranges_between(contents.counts, at, min(at + count, stop)))
            for at in range(first, stop, count)
        ]
        for records in pool.run_in_order("reading part", calls):
            yield from records

    def _contents(self, folder: PartialFolder, pool: WorkerPool) -> Contents:
        """Return what the source holds, found once."""
        if "plan" not in folder.state:
            self._begin("scanning", None)
            self._check_first_sample()
            contents = read_contents(self._spec, self._errors, pool)
            assert contents.schema is not None
            self._raise_if_unsupported(self._target.kind.why_unsupported(contents.schema))
            folder.update(plan=asdict(contents))
        return Contents.from_json(json.loads(json.dumps(folder.state["plan"])))

    def _check_first_sample(self) -> None:
        """Check whether the format supports the first sample, before all samples are scanned."""
        with closing(self._spec.open()) as source:
            try:
                schema = source.schema
            except SourceError:  # the scan raises it with its place
                return
        wide = {name: replace(field, shape=(None,) * len(field.shape)) for name, field in schema.items()}
        if self._target.kind.why_unsupported(wide):
            self._raise_if_unsupported(self._target.kind.why_unsupported(schema))

    def _raise_if_unsupported(self, reason: str) -> None:
        if reason:
            raise SourceError(
                f"{self._target.path}: {reason}; choose or rename fields with fields= (--fields a,new=old)"
            )

    def _folder(self, number: int) -> str:
        return os.path.join(self._target.partial_folder, f"file-{number:06d}")

    def _verify(self, contents: Contents, written: list[Written], pool: WorkerPool) -> None:
        """Read the files again, and compare their samples with those that were written."""
        self._begin("comparing", sum(one.checksum.samples for one in written))
        schema, kind = contents.schema or {}, self._target.kind
        known = inspect.signature(kind.open_files).parameters
        options = {name: value for name, value in self._writer_options.items() if name in known}
        check = partial(check_file, target=self._target, is_ordered=self._target.is_ordered(schema))
        calls = []
        for number, one in enumerate(written):
            folder = self._folder(number)
            spec = SourceSpec([self._target.data_path(folder)], kind.name, list(schema) or None, options)
            calls.append(partial(check, spec=spec, expected=one.checksum, folder=folder))
        pool.run("comparing file", calls)
