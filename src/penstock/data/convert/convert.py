"""`penstock.convert`: writes the samples of one data set in another format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.core.errors import OptionError, SourceError
from penstock.core.host import usable_cores
from penstock.core.units import to_nbytes
from penstock.data.convert.conversion import Conversion, ConversionRun
from penstock.data.convert.numbered_records import SourceSpec
from penstock.data.convert.progress import Progress, ProgressCounter
from penstock.data.convert.remote_target import RemoteTarget
from penstock.data.convert.source_fingerprint import fingerprint_source
from penstock.data.convert.target import Target
from penstock.data.schema import Errors
from penstock.data.select_format import select_format
from penstock.data.storage.storage import Storage, is_remote

_SMALL_NBYTES = 4 << 20


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

    Processes write segments to the folder `dst`.partial: after a kill, the same call resumes with those that are
    missing. The result is renamed to `dst` when it is complete. Samples that the format does not support raise before
    any writing.
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
        shard_size: about the size of each of many files: bytes, or as in "256MiB".
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
    fingerprint = fingerprint_source(kind, paths, storage)
    if workers is None:
        workers = 0 if fingerprint.nbytes < _SMALL_NBYTES else usable_cores()
    if workers < 0:
        raise OptionError(f"workers={workers} has to be 0 or more")
    _check_separate(storage.expand(path), target)
    counter = ProgressCounter(progress)
    started = time.monotonic()
    run = ConversionRun(spec, target, errors, workers, dict(writer_options or {}), counter)
    return run.run(fingerprint, overwrite=overwrite, verify=verify, started=started)


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
