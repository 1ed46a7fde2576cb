"""`penstock.convert`: one data set in, the same samples out, in another format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from penstock.core.errors import OptionError, SourceError
from penstock.core.host import usable_cores
from penstock.core.units import parse_size
from penstock.feed.convert.compare import compare
from penstock.feed.convert.crew import Crew
from penstock.feed.convert.fingerprint import fingerprint
from penstock.feed.convert.plan import contents
from penstock.feed.convert.progress import Meter, Progress
from penstock.feed.convert.reading import Recipe
from penstock.feed.convert.target import Target, nbytes_of
from penstock.feed.convert.work import Conversion, Work
from penstock.feed.sources.formats import chosen
from penstock.feed.sources.sample import Errors
from penstock.feed.sources.storage import Storage, is_remote

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
    """Write the samples of `src` to `dst`, in another format; what comes back from there is equal, bit by bit.

    Work is done by processes in a folder `dst`.partial, and journaled: after a kill the same call goes on. The result
    gets its name when it is whole. A format that cannot hold the samples as they are refuses before it writes.

    Args:
        src: as for `penstock.open`.
        dst: a file or folder of this machine; braces as in out-{000..015}.tar, or `shards` or `shard_size`, make many.
        format: of `src`; told from its name where it is None.
        to: the format of `dst`; told from its name where it is None.
        fields: which fields to take: names, or {new name: name in `src`}.
        workers: processes; 0 works in this one; None takes the usable cores, and none for a few megabytes.
        shards: how many files to make, as in out-000000.tar.
        shard_size: about the size of each of many files: bytes, or as in "256MiB".
        overwrite: replace what is at `dst`, when the result is whole.
        errors: "raise" for the first broken record, or "skip" to leave them out, counted.
        options: of `src`'s format; see its module. Without them tokens are taken to the last one, in pieces where no
            documents are known.
        writer_options: of `dst`'s format.
        verify: read the result again and compare every sample; where `dst` is there already, only compare.
        progress: is called some times a second.

    Raises:
        SourceError: there is no such source, it does not fit the format, `dst` is there already, a disk is full.
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
    path = os.fspath(src) if isinstance(src, str | os.PathLike) else tuple(os.fspath(one) for one in src)
    target = Target.of(os.fspath(dst), format=to, shards=shards, shard_nbytes=_size(shard_size))
    storage = Storage()
    kind, paths = chosen(path, format, storage)
    recipe = Recipe.of(path, format=format, fields=fields, options=options or kind.whole)
    found = fingerprint(kind, paths, storage)
    if workers is None:
        workers = 0 if found.nbytes < _SMALL_NBYTES else usable_cores()
    if workers < 0:
        raise OptionError(f"workers={workers} has to be 0 or more")
    _keep_apart(storage.expand(path), target)
    meter = Meter(progress)
    began = time.monotonic()
    if verify and target.present() and not overwrite and not os.path.isdir(target.partial):
        return _compared(recipe, target, errors, workers, meter, began)
    work = Work(recipe, target, errors, workers, dict(writer_options or {}), meter)
    return work.run(found, overwrite=overwrite, verify=verify, began=began)


def _compared(recipe: Recipe, target: Target, errors: Errors, workers: int, meter: Meter, began: float) -> Conversion:
    """Compare the source with files that are there."""
    files = target.present()
    with closing(Crew(workers)) as crew:
        one = contents(recipe, errors, crew, workers, meter)
        result = Recipe.of(tuple(files), format=target.kind.name, fields=list(one.schema) or None)
        other = contents(result, "raise", crew, workers, meter)
        meter.begin("comparing", other.layout.total)
        tally = compare(
            recipe,
            result,
            one.layout,
            other.layout,
            crew,
            meter,
            errors=errors,
            in_step=one.layout.total == other.layout.total and errors == "raise",
            is_ordered=target.is_ordered(one.schema),
        )
    return Conversion(
        samples=tally.samples,
        files=tuple(files),
        nbytes=sum(nbytes_of(name) for name in files),
        seconds=time.monotonic() - began,
        checksum=tally.checksum(),
        skipped=one.layout.total - tally.samples + one.lost,
        resumed=0,
        verified=True,
    )


def _keep_apart(paths: list[str], target: Target) -> None:
    """Refuse a target that is the source, or lies in it.

    Raises:
        SourceError: it does.
    """
    names = {target.path, *target.names(1 if target.is_numbered else target.shards or 1), *target.present()}
    made = {os.path.realpath(name): name for name in names}
    for one in paths:
        if is_remote(one):
            continue
        source = os.path.realpath(one)
        for real, name in made.items():
            if real == source or real.startswith(source + os.sep):
                raise SourceError(f"{name} lies in the source {one}; write it elsewhere")


def _size(size: int | str | None) -> int | None:
    if size is None:
        return None
    try:
        return parse_size(size)
    except ValueError as error:
        raise OptionError(f"shard_size: {error}") from error
