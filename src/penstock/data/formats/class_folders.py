"""Files in class folders: which there are, and the class of each, in a few bytes a file.

    ROOT/CLASS/.../FILE     as torchvision's ImageFolder reads them: the folders right below the root are the classes,
                            in the order of their names; in each, all files with a known ending, at any depth, by folder
                            and name. Files beside class folders are left out. Unlike there, a class may be empty, and
                            names that begin with a dot are skipped.
    ROOT/FILE               without class folders: the files, by name; no labels
    FILE, FILE, ...         these, in this order; no labels
    ROOT, ROOT, ...         one after another, with the classes of all

A million paths are one piece of memory, not a million objects: what a worker inherits, or is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

import numpy as np

from penstock.core.errors import OptionError, SourceError
from penstock.core.urls import without_query
from penstock.data.formats.split_names import warn_of_splits
from penstock.data.storage.backend import FileVersion
from penstock.data.storage.storage import Storage, is_remote, walk_folders


class Paths(Sequence[str]):
    """Paths below one root, kept in one piece.

    >>> list(Paths("/data/", ["a.jpg", "b/c.jpg"]))
    ['/data/a.jpg', '/data/b/c.jpg']
    """

    def __init__(self, root: str, names: Iterable[str]) -> None:
        self._root = os.fsencode(root)
        encoded = [*map(os.fsencode, names)]
        self._text = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self._root + self._text[self._ends[index] : self._ends[index + 1]])


class ClassFolders:
    """The files that some paths stand for.

    Args:
        paths: folders, or files.
        suffixes: of the files that count in a folder.
        storage: knows what lies remotely.
        labels: whether class folders make labels; None for where there are some.

    Raises:
        SourceError: there is no such file, or labels are wanted and there are no class folders.
    """

    def __init__(
        self, paths: Sequence[str], suffixes: tuple[str, ...], storage: Storage, labels: bool | None = None
    ) -> None:
        self.are_remote = any(map(is_remote, paths))
        """Whether some lie remotely."""
        folders = [path for path in paths if _is_folder(path, suffixes)]
        if folders and len(folders) < len(paths):
            other = next(path for path in paths if path not in folders)
            raise SourceError(f"{folders[0]} is a folder and {other} is a file; name either folders or files")
        root = os.path.join(paths[0], "") if len(folders) == 1 else ""
        if not folders and labels:
            raise OptionError("labels=True needs a folder with class folders, and was given files")
        try:
            found = [_by_class(folder, root, suffixes, storage) for folder in folders] or [{"": list(paths)}]
        except OSError as error:
            raise SourceError(f"{error.filename} cannot be listed: {error.strerror}") from error
        has_classes = all(any(files for name, files in one.items() if name) for one in found)
        if labels and not has_classes:
            raise SourceError(f"labels=True needs class folders, and {folders[0]} has none")
        self.classes: tuple[str, ...] = ()
        """The names of the classes, by label."""
        self.labels: np.ndarray | None = None
        """The class of each file, int32; None without classes."""
        has_labels = has_classes if labels is None else labels
        if has_labels:
            self.classes = tuple(sorted({name for one in found for name in one if name}))
            if labels is None:
                warn_of_splits(folders[0], self.classes, "which are taken for classes")
            numbers = {name: number for number, name in enumerate(self.classes)}
            counts = [(numbers[name], len(files)) for one in found for name, files in sorted(one.items()) if name]
            self.labels = np.repeat(*np.array(counts, np.int32).reshape(-1, 2).T).astype(np.int32)
        in_order = (files for one in found for name, files in sorted(one.items()) if name or not has_labels)
        self.paths = Paths(root, chain.from_iterable(in_order))
        """Where the files lie."""
        self._versions: tuple[np.ndarray, Paths] | None = None
        if folders and self.are_remote and storage.cache is not None:
            known = {url: one for folder in folders for url, one in storage.listed_versions(folder).items()}
            versions = [known.get(path, FileVersion(0, "")) for path in self.paths]
            sizes = np.array([one.nbytes for one in versions], np.int64)
            self._versions = sizes, Paths("", (one.version for one in versions))
        if not self.paths:
            raise SourceError(f"{paths[0]} holds no file that ends on {', '.join(suffixes)}")

    def listed_version(self, index: int) -> FileVersion | None:
        """Return a remote file's version as its folder's listing has it; None where it does not, or without a cache."""
        if self._versions is None or not (version := self._versions[1][index]):
            return None
        return FileVersion(int(self._versions[0][index]), version)


def _is_folder(path: str, suffixes: tuple[str, ...]) -> bool:
    if is_remote(path):
        return not without_query(path).lower().endswith(suffixes)
    if not os.path.exists(path):
        raise SourceError(f"there is no file {path!r}")
    return os.path.isdir(path)


def _by_class(folder: str, root: str, suffixes: tuple[str, ...], storage: Storage) -> dict[str, list[str]]:
    """Return {class: its files, without `root`}; files beside the class folders under ""."""
    by_class: dict[str, list[str]] = {"": []}
    start = len(os.path.join(folder, ""))
    listed: Iterable[tuple[str, Iterable[str]]]
    if is_remote(folder):
        listed = (
            (inner, map(os.path.basename, group)) for inner, group in groupby(storage.list(folder), os.path.dirname)
        )
    else:
        walked = walk_folders(folder)
        listed = sorted((inner, [entry.name for entry in entries if entry.is_file()]) for inner, entries in walked)
    for inner, names in listed:
        prefix = os.path.join(inner, "").removeprefix(root)
        files = by_class.setdefault(inner[start:].partition("/")[0], [])
        files += [prefix + name for name in names if name.lower().endswith(suffixes)]
    return by_class
