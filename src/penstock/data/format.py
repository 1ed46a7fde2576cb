"""What a format is: how its files are recognised, and the functions that read and write them.

Each folder of `penstock.data.formats` makes a `Format` in its `__init__.py`, and `penstock.data.format_registry` lists
them. Looking up a format imports none of its code: `load` does, the first time that the format is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.errors import OptionError

if TYPE_CHECKING:  # schema and source import torch, which looking up a format must not
    from penstock.data.schema import Sample, Schema
    from penstock.data.source import Source
    from penstock.data.stream import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format: its name, what its data look like on disk, and what reads and writes it. Can be pickled.

    >>> from penstock.data.format_registry import format_named
    >>> jsonl = format_named("jsonl")
    >>> jsonl.suffixes[0], jsonl.reads_folders, jsonl.writer is None
    ('.jsonl', False, False)
    """

    name: str
    """The value of `format=` in `penstock.open`."""

    suffixes: tuple[str, ...]
    """How names of its files end, in lower case. Writers add the first one to a name of their choice."""

    load: Callable[[], Implementation]
    """Import what reads and writes it: a module-level function. It raises ExtraError if an optional package is needed
    for the import itself; most formats need theirs only when a file is opened."""

    reads_folder_trees: bool = False
    """Whether `open_files` takes a folder and searches it, as class folders of images need. Other files in it are
    ignored."""

    folder_markers: tuple[str, ...] = ()
    """Files of which at least one lies in a folder that is one data set of this format (`data.mdb`); () if none is."""

    writes_folders: bool = False
    """Whether its writer makes a folder of files."""

    files_without_data: tuple[str, ...] = ()
    """Names of files that end on one of `suffixes` and hold no data (`lock.mdb`)."""

    lossless_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `open_files` with which every value of a file is read: what a conversion opens its source with."""

    @property
    def reads_folders(self) -> bool:
        """Whether the path of its data may be a folder."""
        return self.reads_folder_trees or bool(self.folder_markers)

    @property
    def open_files(self) -> Callable[..., Source | Stream]:
        """Opens files for reading."""
        return self.load().open_files

    @property
    def writer(self) -> Callable[..., Writer] | None:
        """Opens a file for writing; None for a format that is read only."""
        return self.load().writer

    def why_unsupported(self, schema: Schema) -> str:
        """Return why samples of a schema cannot be written; "" if they can. No format writes Python objects."""
        for name, one in schema.items():
            if one.kind == "object":
                return f"field {name!r} is {one.words()}, and only arrays, numbers, text and bytes are written"
        return self.load().why_unsupported(schema)

    def check_options(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Check the names of options against the keyword-only arguments of `open_files` or `writer`.

        Raises:
            OptionError: an option is unknown.
        """
        if not options:  # to look at the arguments takes longer than to open some files
            return
        arguments = inspect.signature(function).parameters.values()
        known = [one.name for one in arguments if one.kind is inspect.Parameter.KEYWORD_ONLY]
        for name in options:
            if name not in known:
                known_options = ", ".join(f"{one}=" for one in known) or "none"
                raise OptionError(f"{self.name} has no option {name}=; it has {known_options} ({self.load.__module__})")


def _is_read_only(schema: Schema) -> str:
    return "the format is read by penstock, and not written"


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """The functions of a format."""

    open_files: Callable[..., Source | Stream]
    """Opens files for reading: `open_files(paths, storage, fields, errors, **options)` returns the samples of `paths`,
    one file after another. Called by `penstock.open`, in any process, once for each dataset. Keyword-only arguments are
    the options of the format.

    It checks options and reads headers, footers and indexes, so that a missing or foreign file is found here. It keeps
    no handle open: the result is pickled and sent to workers, and each process opens files when it first reads. It
    raises SourceError (a file is missing, is of another format, or has other fields than the files before it),
    OptionError or ExtraError."""

    why_unsupported: Callable[[Schema], str] = _is_read_only
    """Returns which field of a schema would not come back from the format as it was, and why; "" if all would. Called
    before a conversion begins."""

    writer: Callable[..., Writer] | None = None
    """Begins a new file: `writer(path, schema, **options)`, of which the name ends on one of the suffixes, which may
    select compression. Called once for each file. Keyword-only arguments are options; those that `open_files` has too
    (a delimiter) are passed to it when the result is read. It raises SourceError where `why_unsupported` has a reason,
    or the file cannot be created."""


class Writer(Protocol):
    """Writes samples of one schema to one new file. Used by one thread of one process of a conversion.

    `write` is called for each sample, in their order, then `close` once. If either raises, neither is called again and
    the file is deleted; it need not be readable. No two writers have the same path.
    """

    def write(self, sample: Sample) -> None:
        """Append a sample.

        Raises:
            SourceError: it does not fit the schema, or cannot be written.
        """

    def close(self) -> None:
        """Complete the file. Only now it has to be readable."""
