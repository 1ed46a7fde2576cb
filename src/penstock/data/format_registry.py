"""The list of formats, and a format by its name or by the name of a file."""

from __future__ import annotations

import re

from penstock.core.errors import SourceError
from penstock.core.urls import without_query
from penstock.data.format import Format
from penstock.data.formats.arrow import ARROW, PARQUET
from penstock.data.formats.audio import AUDIO
from penstock.data.formats.hdf5 import HDF5
from penstock.data.formats.images import IMAGES
from penstock.data.formats.lmdb import LMDB
from penstock.data.formats.tar import TAR
from penstock.data.formats.text import CSV, JSONL
from penstock.data.formats.tfrecord import TFRECORD
from penstock.data.formats.tokens import TOKENS
from penstock.data.formats.video import VIDEO
from penstock.data.formats.zarr import ZARR

FORMATS: tuple[Format, ...] = (
    IMAGES,
    HDF5,
    PARQUET,
    ARROW,
    TOKENS,
    LMDB,
    ZARR,
    VIDEO,
    AUDIO,
    TFRECORD,
    TAR,
    JSONL,
    CSV,
)
"""All formats, in the order in which messages list them. Their suffixes differ."""

_SHARD = re.compile(r"-\d{5,}-of-\d{5,}$")
"""What TensorFlow's writers add to the names of files: x.tfrecord-00000-of-00008."""


def format_named(name: str) -> Format:
    """Return the format with this name.

    Raises:
        SourceError: there is none.
    """
    for format in FORMATS:
        if format.name == name:
            return format
    raise SourceError(f"there is no format {name!r}; there are {', '.join(format.name for format in FORMATS)}")


def format_of_path(path: str) -> Format | None:
    """Return the format whose suffix a path has; None if it has no known suffix.

    >>> format_of_path("s3://bucket/train-000.tar").name, format_of_path("train.txt")
    ('tar', None)
    >>> format_of_path("https://host/a.parquet?signature=x").name, format_of_path("a.tfrecord-00000-of-00008").name
    ('parquet', 'tfrecord')
    """
    lower = _SHARD.sub("", without_query(path).rstrip("/").lower())
    return next((format for format in FORMATS if lower.endswith(format.suffixes)), None)
