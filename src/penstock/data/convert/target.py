"""The target of a conversion: the names of its files, and how finished files are renamed to them.

    out.h5                 one file
    out-{000..015}.tar     as many as the braces expand to
    out.tar, shards=16     out-000000.tar and so on; with shard_size, as many as their size demands

Files are written in a folder beside them, which has the name of the target and ".partial".
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import OptionError, SourceError
from penstock.data.convert.records import files_of
from penstock.data.format import Format
from penstock.data.format_registry import format_named, format_of_path
from penstock.data.schema import Schema
from penstock.data.storage.storage import expand_braces, is_remote, strip_file_scheme

STATE_NAME = "state.json"
"""In the folder of an unfinished conversion: how far it is."""
SIX_DIGITS = "[0-9]" * 6
"""Matches the number in a name."""
RECORD_NAME = "written.json"
"""In the folder of a complete file or segment, beside its data: what was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The files that a conversion writes."""

    path: str
    """As the user gave it."""
    kind: Format
    shards: int | None
    """How many files; None if their size decides."""
    shard_nbytes: int | None
    is_numbered: bool
    """Whether names get numbers, as out-000000.tar."""

    @classmethod
    def parse(
        cls, path: str, *, format: str | None = None, shards: int | None = None, shard_nbytes: int | None = None
    ) -> Target:
        """Return the target for a path and options."""
        path = strip_file_scheme(path).rstrip("/")
        kind = format_named(format) if format is not None else format_of_path(path)
        if kind is None:
            raise SourceError(f"{path} has no suffix of a known format; choose one with to= (--to on the command line)")
        names = expand_braces(path)
        count = len(names)
        if twice := _named_twice(names):
            raise SourceError(f"{path} names {twice} more than once, and one file would replace another; leave one out")
        if shards is not None and shard_nbytes is not None:
            raise OptionError("shards= is the number of files, and shard_size= their size: give only one of them")
        if shards is not None and shards < 1:
            raise OptionError(f"shards={shards} has to be 1 or more")
        if shard_nbytes is not None and shard_nbytes < 1:
            raise OptionError(f"shard_size={shard_nbytes} has to be 1 byte or more")
        if count > 1 and (shard_nbytes is not None or shards not in (None, count)):
            raise OptionError(f"{path} expands to {count} files; leave out shards= and shard_size=")
        is_numbered = count == 1 and (shards is not None or shard_nbytes is not None)
        how_many = None if shard_nbytes is not None else shards or count
        target = cls(path=path, kind=kind, shards=how_many, shard_nbytes=shard_nbytes, is_numbered=is_numbered)
        target.check()
        return target

    def check(self) -> None:
        """Check that the format can be written there."""

    @property
    def suffix(self) -> str:
        """The suffix of the names: writers choose the compression by it."""
        lower = self.path.lower()
        fitting = [suffix for suffix in self.kind.suffixes if lower.endswith(suffix)]
        return self.path[len(self.path) - max(map(len, fitting)) :] if fitting else ""

    @property
    def partial_folder(self) -> str:
        """The folder for unfinished files. Braces in its name would be expanded when its files are read."""
        return self.path.translate(str.maketrans("{}", "()")) + ".partial"

    def data_path(self, folder: str) -> str:
        """Return the path at which the format writes in a folder of `partial_folder`."""
        return os.path.join(folder, f"data{self.suffix}")

    def is_ordered(self, schema: Schema) -> bool:
        """Return whether samples are read in the order in which they were written: images are read class by class."""
        return not (self.kind.name == "images" and "label" in schema)

    def names(self, count: int) -> list[str]:
        """Return the paths of `count` files.

        >>> Target.parse("out.tar.gz", shards=2).names(2), Target.parse("{a,b}.h5").names(2)
        (['out-000000.tar.gz', 'out-000001.tar.gz'], ['a.h5', 'b.h5'])
        """
        if not self.is_numbered:
            return expand_braces(self.path)
        return [self._numbered(f"{number:06d}") for number in range(count)]

    def _numbered(self, number: str) -> str:
        return f"{self.path[: len(self.path) - len(self.suffix)]}-{number}{self.suffix}"

    def existing_files(self) -> list[str]:
        """Return those of its files that exist, including ones with higher numbers than this conversion writes."""
        if not self.is_numbered:
            return [name for name in expand_braces(self.path) if os.path.lexists(name)]
        before, after = map(glob.escape, self._numbered("*").rsplit("*", 1))
        return sorted(glob.glob(f"{before}{SIX_DIGITS}{after}"))

    def check_absent(self, *, overwrite: bool) -> None:
        """Check that nothing is at the target's paths that may not be replaced."""
        for name in self.existing_files():
            _check_replaceable(name)
            if os.path.isdir(name) and not os.path.islink(name):
                raise SourceError(f"{name} is a folder, and folders are not replaced; remove it, or write elsewhere")
            if not overwrite:
                raise SourceError(
                    f"{name} exists; --overwrite (overwrite=True) replaces it when the result is complete"
                )
        self.check_folder()

    def check_folder(self) -> None:
        """Check that there is a folder to write to."""
        folder = os.path.dirname(self.path) or "."
        if not os.path.isdir(folder):
            raise SourceError(f"there is no folder {folder} to write to")

    def nbytes(self, names: Sequence[str]) -> int:
        """Return the bytes of its files."""
        return sum(map(nbytes_of, names))

    def publish(self, folders: list[str], *, overwrite: bool, verify: bool) -> list[str]:
        """Rename the finished files in `partial_folder` to their final names; can be repeated after a kill.

        With `verify` what is there then is read again, unless it was only renamed.
        """
        names = self.names(len(folders))
        moves = [move for folder, name in zip(folders, names, strict=True) for move in self._moves(folder, name)]
        for _, name in moves:
            _check_replaceable(name)
            if os.path.lexists(name) and (not overwrite or os.path.isdir(name)):
                raise SourceError(f"{name} exists; move it away, and repeat the command to resume")
        for written, name in moves:
            os.replace(written, name)
        if overwrite:
            for stale in sorted(set(self.existing_files()) - set(names)):
                os.remove(stale)
        sync(os.path.dirname(self.path) or ".")
        clear_partial_folder(self.partial_folder)
        return names

    def _moves(self, folder: str, name: str) -> list[tuple[str, str]]:
        """Return the files in a folder and their final names; the data file comes last."""
        stem = name[: len(name) - len(self.suffix)]
        inside = os.path.join(self.partial_folder, folder)
        written = os.listdir(inside) if os.path.isdir(inside) else []
        data = f"data{self.suffix}"
        own = [
            (os.path.join(inside, one), stem + one.removeprefix("data"))
            for one in sorted(written)
            if one not in (data, RECORD_NAME)
        ]
        return [*own, (os.path.join(inside, data), name)] if data in written else own


def _named_twice(names: Sequence[str]) -> str:
    """Return a name of a file that has another name before; an empty string if each has one."""
    seen = set()
    for name in names:
        folder, last = os.path.split(name)
        place = name if is_remote(name) else os.path.join(os.path.realpath(folder), last)
        if place in seen:
            return name
        seen.add(place)
    return ""


def _check_replaceable(name: str) -> None:
    """Check that nothing is at a name but a file or a folder, or a link: a device would be gone for all programs."""
    is_descriptor = os.path.islink(name) and os.readlink(name).startswith("/proc/")  # /dev/stdout, whatever it is now
    if is_descriptor or (os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name))):
        raise SourceError(
            f"{name} is neither a file nor a folder (a device, a pipe), and is not replaced; write elsewhere"
        )


def clear_partial_folder(partial_folder: str) -> None:
    """Remove a conversion's folder; its state last, so that the command can resume after a kill in between."""
    for name in sorted(os.listdir(partial_folder), key=lambda name: name == STATE_NAME):
        remove(os.path.join(partial_folder, name))
    os.rmdir(partial_folder)


def remove(path: str) -> None:
    """Remove a file, or a folder with all that is in it."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def sync(path: str) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nbytes_of(path: str) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    return sum(map(os.path.getsize, files_of(path)))
