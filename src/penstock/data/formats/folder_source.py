"""`FolderSource`: samples that are files in class folders, or clips of them: images, videos and audio."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.class_folders import ClassFolders
from penstock.data.rows import ConcatIndex
from penstock.data.schema import Errors, Field, Sample, Schema, Selection
from penstock.data.source import Source
from penstock.data.storage.storage import Storage

_SHOWN = 6
"""Classes in a note."""
_THREADS = 8
_Found = TypeVar("_Found")


def choose_fields(
    fields: Selection, there: Sequence[str], files: ClassFolders, where: str, *, on_request: Sequence[str] = ("path",)
) -> dict[str, str]:
    """Return {name in the sample: field}: all of `there` by default, but those that come only where they are named.

    "label" is not there without class folders. The columns of a table that names the files are there, but for one that
    names them and is called as a field is.

    Raises:
        SourceError: a field is missing, or a column is called as one is.
    """
    known = [name for name in there if name != "label" or files.labels is not None]
    if (media := files.media) is not None:
        if media.column in known:
            del media.columns[media.column]
        if both := next((name for name in media.columns if name in known), None):
            raise SourceError(
                f"{media.table} has a column {both!r}, and so is a field of {where} called; pass rows with another "
                f"name for it: media=[row | {{'other': row[{both!r}]}} for row in ...]"
            )
        known = [*media.columns, *known]
    if fields.chosen is not None:
        return fields.names(known, where)
    return {name: name for name in known if name not in on_request}


def read_each(read: Callable[[str, int], _Found], paths: Sequence[str], empty: _Found, errors: Errors) -> list[_Found]:
    """Return what `read` finds in each file, given its path and number; several at a time.

    With errors="skip" a file that cannot be read gives `empty`, and a warning.

    Raises:
        SourceError: a file cannot be read, with errors="raise".
    """
    found: list[_Found] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for future in [pool.submit(read, path, number) for number, path in enumerate(paths)]:
            try:
                found.append(future.result())
            except SourceError as error:
                if errors == "raise":
                    pool.shutdown(cancel_futures=True)
                    raise
                warnings.warn(f"left out: {error}", stacklevel=4)
                found.append(empty)
    return found


@dataclass(kw_only=True, eq=False, repr=False)
class FolderSource(Source):
    """Samples of files in class folders."""

    where: str
    """For messages."""
    files: ClassFolders
    chosen: dict[str, str]
    """{name in the sample: field}."""
    storage: Storage
    max_record_nbytes: int
    """Of what is read of one file."""
    clips: ConcatIndex | None = None
    """Of each file; None where a file is a sample."""

    def _field(self, own: str) -> Field:
        """Return what a field that is neither the label nor the path holds."""
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        """What samples hold, as far as all have it in common."""
        known = {"label": Field("number", "int64"), "path": Field("text")}
        if (media := self.files.media) is not None:
            known |= {name: media.field(name) for name in media.columns}
        return {name: known.get(own) or self._field(own) for name, own in self.chosen.items()}

    def __len__(self) -> int:
        return len(self.files.paths) if self.clips is None else len(self.clips)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label; empty without labels."""
        return self.files.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class."""
        return {name: number for number, name in enumerate(self.files.classes)}

    @property
    def notes(self) -> list[str]:
        """How labels were made, and what was left out."""
        files, notes = self.files, []
        if files.classes:
            more = ", ..." if len(files.classes) > _SHOWN else ""
            notes.append(f"labels: {len(files.classes)} class folders: {', '.join(files.classes[:_SHOWN])}{more}")
        if files.media is not None:
            notes.append(f"a sample is a row of {files.media.table}, of which {files.media.column!r} names the file")
        if files.left_out:
            notes.append(f"left out, as labels= was given: {files.left_out}")
        return notes

    @property
    def labels(self) -> np.ndarray | None:
        """The label of every sample, int32, without reading any: what a sampler weighs by. None without labels."""
        labels = self.files.labels
        return labels if labels is None or self.clips is None else np.repeat(labels, np.diff(self.clips.starts))

    def select_fields(self, fields: Sequence[str]) -> Self:
        """Return the same samples with these fields only; nothing is decoded that is not among them."""
        other = copy.copy(self)
        kept = Selection.of(list(fields)).names(self.chosen, self.where)
        other.chosen = {name: self.chosen[name] for name in kept}
        return other

    def read_paths(self) -> Sequence[str]:
        """Return the files that samples are read from."""
        return self.files.paths

    def _sample(self, number: int, value: Callable[[str], Any]) -> Sample:
        """Return the sample of file `number`; `value` makes the fields that are neither its label nor its path."""
        labels, media, sample = self.files.labels, self.files.media, Sample()
        for name, own in self.chosen.items():
            if own == "label" and labels is not None:
                sample[name] = int(labels[number])
            elif media is not None and own in media.columns:
                sample[name] = media.value(own, number)
            else:
                sample[name] = self.files.paths[number] if own == "path" else value(own)
        return sample
