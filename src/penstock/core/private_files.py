"""Folders and files that are this user's alone, whoever else may write beside them.

    folder     made with mode 0700. One that exists is used if it is this user's, and no other may write in it
    file       made with mode 0600. One that exists is used if it is an ordinary file of this user's that no other may
               write to. It is opened without following a link or waiting for a pipe, and what was opened is looked at,
               not what has its name by now. What is written to has one name: a second one may be of a file elsewhere

A link to a folder is followed if it is this user's or root's. Anything else raises `SourceError`, and is left as it is.
"""

from __future__ import annotations

import errno
import os
import stat

from penstock.core.errors import SourceError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def make_folder(path: str, *, closed: bool = False) -> bool:
    """Make a folder, and those above it that are missing; return False if it was there, and is this user's.

    Args:
        path: of the folder.
        closed: whether one that is there has to be closed to others, and no link.

    Raises:
        SourceError: it is another's, or another may write in it or (`closed`) enter it.
        OSError: it cannot be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_folder(f"{folder}/a/b"), make_folder(f"{folder}/a/b"), oct(os.stat(f"{folder}/a").st_mode & 0o777)
    (True, False, '0o700')
    """
    try:
        os.mkdir(path, 0o700)
        return True
    except FileExistsError:
        check_folder(path)
        if closed and os.lstat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):  # a link has all of these
            raise SourceError(
                f"other users have access to {path}, so what is in it may be theirs; remove it to start over"
            ) from None
        return False
    except FileNotFoundError:
        parent = os.path.dirname(path.rstrip("/"))
        if not parent or os.path.lexists(parent):
            raise
        make_folder(parent)
    return make_folder(path, closed=closed)


def check_folder(path: str) -> None:
    """Check that a folder is this user's, and that no other may write in it.

    Raises:
        SourceError: it is not.
        OSError: it cannot be looked at.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        if status.st_uid not in (_user(), 0):
            raise SourceError(f"{path} is a link of {_owner(status)}; remove it, or choose another folder")
        status = os.stat(path)
    if status.st_uid != _user():
        raise SourceError(
            f"{path} belongs to {_owner(status)}, who may change what is in it; choose another folder, or "
            "one in it that is not there yet"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise SourceError(
            f"other users may write in {path}; if nobody has, chmod go-w it, else remove it or choose another folder"
        )


def open_file(path: str, flags: int) -> int:
    """Return a descriptor of a file, as `os.open`; with O_CREAT it is made if it is missing.

    Raises:
        SourceError: it is no ordinary file, another's, or another may write to it.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and os.path.islink(path):
            raise SourceError(f"{path} is a link, which is not followed; remove it, or choose another path") from error
        raise
    try:
        _check_file(path, os.fstat(descriptor), writes=flags & os.O_ACCMODE != os.O_RDONLY)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_tree(folder: str) -> None:
    """Check that all in a folder that is closed to others is this user's: files and folders, and no links.

    Raises:
        SourceError: another user has left something there.
        OSError: it cannot be looked at.
    """
    for inside, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(inside, name)
            status = os.lstat(path)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise SourceError(f"{path} is neither a file nor a folder; remove {folder} to start over")
            if status.st_uid != _user():
                raise SourceError(f"{path} belongs to {_owner(status)}; remove {folder} to start over")
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                raise SourceError(f"{path} has a second name (a hard link); remove {folder} to start over")


def _check_file(path: str, status: os.stat_result, *, writes: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path} is no ordinary file; remove it, or choose another path")
    if status.st_uid != _user():
        raise SourceError(f"{path} belongs to {_owner(status)}, who may change it; remove it, or choose another path")
    if status.st_mode & _OTHERS_WRITE:
        raise SourceError(f"other users may write to {path}, and may have; remove it, or choose another path")
    if writes and status.st_nlink > 1:
        raise SourceError(
            f"{path} has {status.st_nlink} names (hard links), and may be a file elsewhere; remove it, or choose "
            "another path"
        )


def _user() -> int:
    if not hasattr(os, "geteuid"):
        raise SourceError("this system does not say whose a file is, which caches of files need: use Linux or macOS")
    return os.geteuid()


def _owner(status: os.stat_result) -> str:
    return "root" if status.st_uid == 0 else f"another user ({status.st_uid})"
