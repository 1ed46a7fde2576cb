"""Where a conversion writes: the names of its files, and how they come to stand there, whole or not at all.

    out.h5                 one file
    out-{000..015}.tar     as many as the braces spell out
    out.tar, shards=16     out-000000.tar and so on; likewise with shard_nbytes, and then as many as it takes

All work is done in a folder beside them, named like the target with ".partial" at its end.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from dataclasses import dataclass

from penstock.core.errors import OptionError, SourceError
from penstock.feed.sources.formats import Format, named, of_path
from penstock.feed.sources.sample import Schema
from penstock.feed.sources.storage import is_remote, spelled_out, without_scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The files that a conversion makes."""

    path: str
    """As it was given."""
    kind: Format
    shards: int | None
    """How many files; None where their size decides."""
    shard_nbytes: int | None
    is_numbered: bool
    """Whether names get numbers, as out-000000.tar."""

    @classmethod
    def of(
        cls, path: str, *, format: str | None = None, shards: int | None = None, shard_nbytes: int | None = None
    ) -> Target:
        """Return the target that a path and options mean.

        Raises:
            OptionError: the options contradict each other.
            SourceError: the name tells no format.
        """
        if is_remote(path):
            scheme = path.partition("://")[0]
            raise OptionError(
                f"{path} is not on this machine, and results are written there only; name a local path, and upload "
                f"what it holds then, as with fsspec.filesystem({scheme!r}).put(...)"
            )
        path = without_scheme(path).rstrip("/")
        kind = named(format) if format is not None else of_path(path)
        if kind is None:
            raise SourceError(f"{path} has no name that tells a format; say to= (--to on the command line)")
        count = len(spelled_out(path))
        if shards is not None and shard_nbytes is not None:
            raise OptionError("shards= says how many files, and shard_size= how large they are: give one of them")
        if shards is not None and shards < 1:
            raise OptionError(f"shards={shards} has to be 1 or more")
        if shard_nbytes is not None and shard_nbytes < 1:
            raise OptionError(f"shard_size={shard_nbytes} has to be 1 byte or more")
        if count > 1 and (shard_nbytes is not None or shards not in (None, count)):
            raise OptionError(f"{path} spells out {count} files; leave shards= and shard_size= away")
        is_numbered = count == 1 and (shards is not None or shard_nbytes is not None)
        how_many = None if shard_nbytes is not None else shards or count
        return cls(path=path, kind=kind, shards=how_many, shard_nbytes=shard_nbytes, is_numbered=is_numbered)

    @property
    def suffix(self) -> str:
        """What the names end on: writers tell compression by it."""
        lower = self.path.lower()
        fitting = [suffix for suffix in self.kind.suffixes if lower.endswith(suffix)]
        return self.path[len(self.path) - max(map(len, fitting)) :] if fitting else ""

    @property
    def partial(self) -> str:
        """The folder in which the work is done. Braces in its name would be spelled out when its files are read."""
        return self.path.translate(str.maketrans("{}", "()")) + ".partial"

    def is_ordered(self, schema: Schema) -> bool:
        """Say whether samples come back in the order in which they were written: pictures come class by class."""
        return not (self.kind.name == "images" and "label" in schema)

    def names(self, count: int) -> list[str]:
        """Return the paths of `count` files.

        >>> Target.of("out.tar.gz", shards=2).names(2), Target.of("{a,b}.h5").names(2)
        (['out-000000.tar.gz', 'out-000001.tar.gz'], ['a.h5', 'b.h5'])
        """
        if not self.is_numbered:
            return spelled_out(self.path)
        stem = self.path[: len(self.path) - len(self.suffix)]
        return [f"{stem}-{number:06d}{self.suffix}" for number in range(count)]

    def present(self) -> list[str]:
        """Return those of its files that are there now; also ones with higher numbers than this conversion makes."""
        if not self.is_numbered:
            return [name for name in spelled_out(self.path) if os.path.lexists(name)]
        stem = self.path[: len(self.path) - len(self.suffix)]
        numbered = re.compile(re.escape(stem) + r"-\d{6}" + re.escape(self.suffix))
        return sorted(
            name for name in glob.glob(f"{glob.escape(stem)}-*{glob.escape(self.suffix)}") if numbered.fullmatch(name)
        )

    def refuse(self, *, overwrite: bool) -> None:
        """Refuse to write over what is there.

        Raises:
            SourceError: there is something, and it may not be replaced.
        """
        for name in self.present():
            if os.path.isdir(name) and not os.path.islink(name):
                raise SourceError(f"{name} is a folder, and folders are not replaced; remove it, or write elsewhere")
            if not overwrite:
                raise SourceError(f"{name} is there already; --overwrite (overwrite=True) replaces it at the end")
        folder = os.path.dirname(self.path) or "."
        if not os.path.isdir(folder):
            raise SourceError(f"there is no folder {folder} to write to")

    def publish(self, folders: list[str], *, overwrite: bool) -> list[str]:
        """Rename the finished files, each in its folder in `partial`, to their names; can be repeated after a kill.

        Returns:
            The names.

        Raises:
            SourceError: one is there already, and may not be replaced.
        """
        names = self.names(len(folders))
        moves = [move for folder, name in zip(folders, names, strict=True) for move in self._moves(folder, name)]
        for _, name in moves:
            if os.path.lexists(name) and (not overwrite or os.path.isdir(name)):
                raise SourceError(f"{name} is there already; move it away, and the same command goes on")
        for made, name in moves:
            os.replace(made, name)
        if overwrite:
            for stale in sorted(set(self.present()) - set(names)):
                os.remove(stale)
        sync_folder(os.path.dirname(self.path) or ".")
        _clear(self.partial)
        return names

    def _moves(self, folder: str, name: str) -> list[tuple[str, str]]:
        """Return the files in a folder and what each is to be called; the data come last."""
        stem = name[: len(name) - len(self.suffix)]
        inside = os.path.join(self.partial, folder)
        made = os.listdir(inside) if os.path.isdir(inside) else []
        data = f"data{self.suffix}"
        own = [(os.path.join(inside, one), stem + one.removeprefix("data")) for one in sorted(made) if one != data]
        return [*own, (os.path.join(inside, data), name)] if data in made else own


def _clear(partial: str) -> None:
    """Remove the folder; its journal last, so that a kill in between is gone on from."""
    for name in sorted(os.listdir(partial), key=lambda name: name == "journal.jsonl"):
        path = os.path.join(partial, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)
    os.rmdir(partial)


def sync_file(path: str) -> None:
    """Have a file, or all files of a folder, written to the disk."""
    if not os.path.isdir(path):
        _sync(path)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync(folder)


def sync_folder(path: str) -> None:
    """Have the names in a folder written to the disk."""
    _sync(path)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nbytes_of(path: str) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)
