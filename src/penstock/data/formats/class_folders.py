"""Files of one kind in folders: which there are, and the class of each, in a few bytes a file.

    ROOT/CLASS/.../FILE     as torchvision's ImageFolder reads them: the folders right below the root are the classes,
                            in the order of their names; in each, all files with a known ending, at any depth, by folder
                            and name. Unlike there, a class may be empty, and names that begin with a dot are skipped.
    ROOT/FILE               without class folders: the files, by name; no labels
    FILE, FILE, ...         these, in this order; no labels
    ROOT, ROOT, ...         one after another, with the classes of all

Folders are classes where nothing else is likely. Other files in them (tables, annotations, captions), files beside the
folders, several splits, and folders named for what files are (images, masks) are refused, with what was found, unless
`labels=` says whether the folders are classes. All files in one folder, and two folders with files of the same names,
are warned of.

A million paths are one piece of memory, not a million objects: what a worker inherits, or is sent.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np

from penstock.core.errors import OptionError, SourceError
from penstock.core.urls import without_query
from penstock.data.formats.media_rows import MediaRows
from penstock.data.formats.paths import Paths
from penstock.data.formats.split_names import splits_in
from penstock.data.storage.backend import FileVersion
from penstock.data.storage.storage import Storage, is_remote, walk_folders

_ROLES = re.compile(
    r"(ann|annotation|bbox|clip|color|depth|frame|groundtruth|gt|image|imageset|img|input|jpegimage|label|mask|photo|picture"
    r"|rgb|segmentation|segmentationclass|segmentationobject|target|wav|audio|video)(e?s)?"
)
"""What folders are named for that hold one part of each sample, without digits, - and _, and a plural's s."""

_NO_DATA = re.compile(r"(readme|license|licence|copying|changelog|thumbs\.db|desktop\.ini)\b.*|.*\.(md|ini|log)", re.I)
"""Names of files that say nothing of samples."""

_SHOWN = 6
"""Of what lies in a folder, in an error."""


class ClassFolders:
    """The files that some paths stand for.

    Args:
        paths: folders, or files.
        suffixes: of the files that count in a folder.
        storage: knows what lies remotely.
        labels: whether class folders make labels; None for where nothing else is likely.
        media: rows that name the files, one each: these are the samples, without labels.

    Raises:
        SourceError: there is no such file, or labels are wanted and there are no class folders; or without `labels` it
            is not clear what folders are.
    """

    def __init__(
        self,
        paths: Sequence[str],
        suffixes: tuple[str, ...],
        storage: Storage,
        labels: bool | None = None,
        media: MediaRows | None = None,
    ) -> None:
        if media is not None and labels:
            raise OptionError(
                "labels=True makes labels of class folders, and media= has the columns of a table instead"
            )
        labels = labels if media is None else False
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
            listed = [_find(folder, root, suffixes, storage) for folder in folders]
        except OSError as error:
            raise SourceError(f"{error.filename} cannot be listed: {error.strerror}") from error
        found = [one.by_class for one in listed] or [{"": list(paths)}]
        if not any(chain.from_iterable(one.values() for one in found)):
            raise SourceError(f"{paths[0]} holds no file that ends on {', '.join(suffixes)}")
        has_classes = all(any(files for name, files in one.items() if name) for one in found)
        if labels and not has_classes:
            raise SourceError(f"labels=True needs class folders, and {folders[0]} has none")
        if labels is None:
            for folder, one in zip(folders, listed, strict=True):
                _refuse_if_unclear(folder, one)
            has_classes = has_classes and all(map(_are_classes, folders, listed))
        self.left_out = "" if media is not None else _words([name for one in listed for name in one.others])
        """What else lies in the folders, in words."""
        self.classes: tuple[str, ...] = ()
        """The names of the classes, by label."""
        self.labels: np.ndarray | None = None
        """The class of each file, int32; None without classes."""
        has_labels = has_classes if labels is None else labels
        if has_labels:
            self.classes = tuple(sorted({name for one in found for name in one if name}))
            numbers = {name: number for number, name in enumerate(self.classes)}
            counts = [(numbers[name], len(files)) for one in found for name, files in sorted(one.items()) if name]
            self.labels = np.repeat(*np.array(counts, np.int32).reshape(-1, 2).T).astype(np.int32)
        in_order = (files for one in found for name, files in sorted(one.items()) if name or not has_labels)
        self.paths = Paths(root, chain.from_iterable(in_order))
        """Where the files lie."""
        self._versions: tuple[np.ndarray, Paths] | None = None
        if folders and self.are_remote:
            known = {url: one for folder in folders for url, one in storage.listed_versions(folder).items()}
            versions = [known.get(path, FileVersion(0, "")) for path in self.paths]
            sizes = np.array([one.nbytes for one in versions], np.int64)
            self._versions = sizes, Paths("", (one.version for one in versions))
        self.media = media
        """The rows of which each names a file."""
        if media is not None:
            self.keep(media.locate(self.paths, paths[0]))

    def keep(self, numbers: Sequence[int]) -> None:
        """Have these files only."""
        self.paths = Paths("", [self.paths[number] for number in numbers])
        self.labels = None if self.labels is None else self.labels[numbers]
        self._versions = None

    def listed_version(self, index: int) -> FileVersion | None:
        """Return a remote file's version as its folder's listing has it; None where it does not."""
        if self._versions is None or not (version := self._versions[1][index]):
            return None
        return FileVersion(int(self._versions[0][index]), version)


def _is_folder(path: str, suffixes: tuple[str, ...]) -> bool:
    if is_remote(path):
        return not without_query(path).lower().endswith(suffixes)
    if not os.path.exists(path):
        raise SourceError(f"there is no file {path!r}")
    return os.path.isdir(path)


@dataclass(slots=True)
class _Found:
    """What lies in a folder."""

    by_class: dict[str, list[str]]
    """{class: its files, without the root}; files beside the class folders under ""."""
    others: list[str]
    """Other files, below the folder."""
    folders: list[str]
    """Of the files, below the folder."""


def _words(names: Iterable[str]) -> str:
    """Return what files there are in some words.

    >>> _words(["images/a.jpg", "images/b.jpg", "images/c/d.txt", "train.csv"])
    'images/ (2 of .jpg, 1 of .txt), train.csv'
    """
    counts: dict[str, Counter[str]] = {}
    for name in names:
        top, slash, _ = name.partition("/")
        counts.setdefault(top + slash, Counter())[os.path.splitext(name)[1].lower() or "no suffix"] += 1
    words = [
        f"{top} ({', '.join(f'{count} of {kind}' for kind, count in kinds.most_common(3))})" if top[-1] == "/" else top
        for top, kinds in counts.items()
    ]
    return ", ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")


def _find(folder: str, root: str, suffixes: tuple[str, ...], storage: Storage) -> _Found:
    found = _Found({"": []}, [], [])
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
        below = os.path.join(inner, "")[start:]
        prefix = os.path.join(inner, "").removeprefix(root)
        files = found.by_class.setdefault(below.partition("/")[0], [])
        for name in names:
            if name.lower().endswith(suffixes):
                files.append(prefix + name)
            elif not _NO_DATA.fullmatch(name):
                found.others.append(below + name)
        found.folders.append(below)
    return found


def _why_unclear(found: _Found) -> str:
    """Return why folders may not be classes, or the files not all there is; "" if they are."""
    classes = [name for name, files in found.by_class.items() if name and files]
    if found.others:
        return f"{found.others[0]} may say more about them"
    if classes and found.by_class[""]:
        return "some files are in folders, and some are not"
    splits = splits_in(found.folders)
    if len(splits) > 1:
        examples = ", ".join(f"{split} ({name.rstrip('/')})" for split, name in splits.items())
        return f"it holds several splits: {examples}"
    if len(classes) == 1 and splits_in(classes):
        return f"{classes[0]!r} is a split, not a class"
    named = [name for name in classes if _ROLES.fullmatch(re.sub(r"[\d_-]", "", name.lower()))]
    return f"{named[0]!r} does not look like a class" if named and len(classes) > 1 else ""


def _refuse_if_unclear(folder: str, found: _Found) -> None:
    if why := _why_unclear(found):
        own = ((top, os.path.basename(file)) for top, files in found.by_class.items() for file in files)
        there = _words([*(f"{top}/{name}".lstrip("/") for top, name in own), *found.others])
        raise SourceError(
            f"penstock cannot tell what the samples of {folder} are: {why}. It holds {there}. Open one of its folders "
            "(the files of one split), or pass labels=True (its folders are classes), labels=False (files without "
            'labels), media="TABLE" (a table, CSV or JSON, or COCO\'s annotations, names the file of each sample), or '
            'for images masks="FOLDER"'
        )


def _are_classes(folder: str, found: _Found) -> bool:
    """Return whether a folder's folders are classes; warn where they could be something else."""
    by_class = {name: files for name, files in found.by_class.items() if name}
    if len(by_class) == 1 and not next(iter(by_class)).isdigit():  # `ImageFolderWriter` numbers them
        warnings.warn(
            f"all files of {folder} are in one folder, {next(iter(by_class))}/, and penstock makes no labels; pass "
            "labels=True if the folder is a class, or labels=False if it is not",
            stacklevel=2,
        )
        return False
    if len(by_class) == 2:
        one, other = (
            {os.path.splitext(file.rpartition(f"{name}/")[2])[0] for file in files} for name, files in by_class.items()
        )
        if one == other:
            warnings.warn(
                f"the folders {' and '.join(by_class)} of {folder} have files with the same names, and penstock reads "
                "each folder as a class; pass labels=True if that is right, or masks= if one has masks of the other's "
                "images",
                stacklevel=2,
            )
    return any(by_class.values())
