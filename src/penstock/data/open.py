"""`penstock.open`: a path in, a dataset out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.core.errors import OptionError
from penstock.core.units import to_nbytes
from penstock.data.formats.media_rows import Table, read_rows
from penstock.data.schema import Errors, Selection
from penstock.data.select_format import select_format
from penstock.data.source import Source
from penstock.data.storage.listings import kept_listings
from penstock.data.storage.storage import Storage
from penstock.data.stream import Stream
from penstock.distributed.rank import Distributed


def open(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    format: str | None = None,
    fields: Mapping[str, str] | list[str] | tuple[str, ...] | None = None,
    errors: Errors = "raise",
    cache: str | os.PathLike[str] | None = None,
    cache_nbytes: int | str = 32 << 30,
    storage: Storage | None = None,
    distributed: Distributed = False,
    media: Table | None = None,
    column: str | None = None,
    **options: Any,
) -> Source | Stream:
    r"""Open a folder, a file or many as a dataset whose samples are dicts of fields.

    Args:
        path: a folder of images or of files of one format, a file, a URL that fsspec knows, wildcards or braces as in
            train-{000..127}.tar, or several of these. Below a folder, names that begin with a dot or _ are ignored.
        format: images, hdf5, parquet, arrow, tokens, lmdb, zarr, video, audio, tfrecord, tar, jsonl or csv; None
            guesses it from the name.
        fields: which fields a sample has: names, or {name in the sample: name in the file}; None for all.
        errors: "raise" for the first broken record, or "skip": streams leave them out, warn, and count them in
            `skipped`. (For sources with random access, pass `errors=` to the DataLoader instead.)
        cache: a folder for copies of remote files, shared by all workers.
        cache_nbytes: the most that it may hold: bytes, or as in "32GiB".
        storage: a `penstock.Storage`, for other retries, time-outs and request sizes than the default; the cache is its
            own then.
        distributed: all ranks of the job (or of a process group, or of a mesh of one dimension) open this path here, at
            the same time: the first one lists remote folders and wildcards, and the others get its list.
        media: a table that names the files of a folder: a CSV, JSON or Parquet file, COCO's JSON, a source, or a list
            of dicts. Each of its rows is a sample: its columns, and what the format makes of the file. See
            `penstock.data.formats.media_rows`.
        column: which column of it names the file; None for the only one whose values do.
        **options: the format's own: `size=` of images, `index=True` of TFRecord ...; docs/formats.md lists all, and so
            does the error for one that it has not. Those that are bytes (`..._nbytes`) may be text as in "1GiB".

    Returns:
        A `Source` (random access: `len`, indices) or a `Stream` (iterable).

    Raises:
        SourceError: there is nothing, or nothing of a known format.
        ExtraError: a package is missing; the message names the extra that brings it.
        OptionError: the format has no such option, or a size is none; or `distributed` does not fit the ranks.

    Example:
        >>> import pathlib
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "train.csv").write_text("text,label\na cat,0\na dog,1\n")
        ...     stream = open(f"{folder}/train.csv", fields={"y": "label"}, dtypes={"label": "int64"})
        ...     [int(sample["y"]) for sample in stream]
        [0, 1]
    """
    _check_fields(fields)
    if errors not in ("raise", "skip"):
        raise OptionError(f"errors={errors!r} is neither 'raise' nor 'skip'")
    if storage is None:
        cache_nbytes = to_nbytes("cache_nbytes", cache_nbytes)
        storage = Storage(cache=None if cache is None else os.fspath(cache), cache_nbytes=cache_nbytes)
    elif cache is not None:
        raise OptionError("cache= and storage= do not go together; give the storage its cache: Storage(cache=...)")
    else:
        storage = replace(storage)  # copies of files without a version are of one opening
    sizes = {name: to_nbytes(name, value) for name, value in options.items() if name.endswith("_nbytes")}
    with kept_listings(distributed):
        selected, paths = select_format(path, format, storage)
        if media is not None:
            options["media"] = read_rows(media, os.fspath(paths[0]), column, partial(open, storage=storage))
        elif column is not None:
            raise OptionError(f"column={column!r} is of a table that names files: pass media=, too")
        selected.check_options(selected.open_files, options)
        return selected.open_files(paths, storage, Selection.of(fields), errors, **{**options, **sizes})


def _check_fields(fields: object) -> None:
    if fields is not None and (isinstance(fields, str) or not fields):
        raise OptionError(f"fields={fields!r} names no fields; write them as in ['image'] or {{'image': 'x'}}")
