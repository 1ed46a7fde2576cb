"""`penstock.open`: a path in, a dataset out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.core.errors import OptionError
from penstock.feed.sources.base import Source
from penstock.feed.sources.formats import chosen
from penstock.feed.sources.sample import Errors, Selection
from penstock.feed.sources.storage import Storage
from penstock.feed.sources.stream import Stream


def open(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    format: str | None = None,
    fields: Mapping[str, str] | list[str] | tuple[str, ...] | None = None,
    errors: Errors = "raise",
    cache: str | os.PathLike[str] | None = None,
    cache_nbytes: int = 32 << 30,
    storage: Storage | None = None,
    **options: Any,
) -> Source | Stream:
    """Open a folder, a file or many as a dataset whose samples are dicts of fields.

    Args:
        path: a folder of images or of files of one format, a file, a URL that fsspec knows, wildcards or braces as in
            train-{000..127}.tar, or several of these.
        format: images, hdf5, parquet, arrow, tokens, lmdb, zarr, video, tfrecord, tar, jsonl or csv; told from the
            name where it is None.
        fields: which fields a sample has: names, or {name in the sample: name in the file}; all where it is None.
        errors: "raise" for the first broken record, or "skip": streams leave them out, warn, and count them in
            `skipped`. (For sources with random access a DataLoader's own `errors=` says what to do.)
        cache: a folder for copies of remote files, shared by all workers.
        cache_nbytes: the most that it may hold.
        storage: for other retries, time-outs and sizes of requests than the usual; then it says what `cache` is, too.
        **options: the format's own; see its module.

    Returns:
        A `Source` (random access: `len`, indices) or a `Stream` (one after another).

    Raises:
        SourceError: there is nothing, or nothing of a known format.
        ExtraError: a package is missing; the message names the extra that brings it.
        OptionError: the format has no such option.
    """
    _check_fields(fields)
    if errors not in ("raise", "skip"):
        raise OptionError(f"errors={errors!r} is neither 'raise' nor 'skip'")
    if storage is None:
        storage = Storage(cache=None if cache is None else os.fspath(cache), cache_nbytes=cache_nbytes)
    kind, paths = chosen(path, format, storage)
    module = kind.load()
    kind.check_options(module.opened, options)
    source: Source | Stream = module.opened(
        paths, storage=storage, fields=Selection.of(fields), errors=errors, **options
    )
    return source


def _check_fields(fields: object) -> None:
    if fields is not None and (isinstance(fields, str) or not fields):
        raise OptionError(f"fields={fields!r} names no fields; write them as in ['image'] or {{'image': 'x'}}")
