"""`FolderSource`: samples that are files in class folders, or clips of them: images, videos and audio."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from penstock.data.concat_index import ConcatIndex
from penstock.data.formats.class_folders import ClassFolders
from penstock.data.schema import Sample, Selection
from penstock.data.source import Source


def choose_fields(
    fields: Selection, there: Sequence[str], files: ClassFolders, where: str, *, on_request: Sequence[str] = ("path",)
) -> dict[str, str]:
    """Return {name in the sample: field}: all of `there` by default, but those that come only where they are named.

    "label" is not there without class folders.

    Raises:
        SourceError: a field is missing.
    """
    known = [name for name in there if name != "label" or files.labels is not None]
    if fields.chosen is not None:
        return fields.names(known, where)
    return {name: name for name in known if name not in on_request}


class FolderSource(Source):
    """Samples of files in class folders. A format implements `_value`.

    Args:
        where: for messages.
        files: which.
        chosen: {name in the sample: field}.
        clips: of each file; None where a file is a sample.
    """

    def __init__(
        self, where: str, files: ClassFolders, chosen: dict[str, str], clips: ConcatIndex | None = None
    ) -> None:
        self.where = where
        self._files = files
        self._chosen = chosen
        self._clips = clips

    def __len__(self) -> int:
        return len(self._files.paths) if self._clips is None else len(self._clips)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label; empty without labels."""
        return self._files.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class."""
        return {name: number for number, name in enumerate(self._files.classes)}

    @property
    def labels(self) -> np.ndarray | None:
        """The label of every sample, int32, without reading any: what a sampler weighs by. None without labels."""
        labels = self._files.labels
        return labels if labels is None or self._clips is None else np.repeat(labels, np.diff(self._clips.starts))

    def select_fields(self, fields: Sequence[str]) -> Self:
        """Return the same samples with these fields only; nothing is decoded that is not among them."""
        other = copy.copy(self)
        kept = Selection.of(list(fields)).names(self._chosen, self.where)
        other._chosen = {name: self._chosen[name] for name in kept}
        return other

    def _sample(self, number: int, value: Callable[[str], Any]) -> Sample:
        """Return the sample of file `number`; `value` makes the fields that are neither its label nor its path."""
        labels, sample = self._files.labels, Sample()
        for name, own in self._chosen.items():
            if own == "label" and labels is not None:
                sample[name] = int(labels[number])
            else:
                sample[name] = self._files.paths[number] if own == "path" else value(own)
        return sample
