"""Folders and files that are this user's alone: others' are refused, whatever they have put in their place."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from other_users import NOBODY, needs_root

from penstock.core.errors import SourceError
from penstock.core.private_files import check_tree, make_folder, open_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
    os.close(open_file(str(path), flags))


@pytest.mark.parametrize("umask", [0, 0o002, 0o022])
def test_what_is_made_is_this_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert make_folder(str(tmp_path / "a" / "b"))
        opened(tmp_path / "a" / "b" / "file")
    finally:
        os.umask(before)
    assert not make_folder(str(tmp_path / "a" / "b"))
    opened(tmp_path / "a" / "b" / "file")
    assert [mode(path) for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/file")] == [0o700, 0o700, 0o600]


def _link(path: Path) -> None:
    (path.parent / "mine").write_text("kept")
    path.symlink_to("mine")


def _dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _hard_link(path: Path) -> None:
    (path.parent / "mine").write_text("kept")
    path.hardlink_to(path.parent / "mine")


def _writable(path: Path) -> None:
    path.touch()
    path.chmod(0o620)


def _of_another(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, NOBODY, NOBODY)


FILES: list[object] = [
    pytest.param(_link, "is a link", id="link"),
    pytest.param(_dangling_link, "is a link", id="dangling link"),
    pytest.param(_hard_link, "has 2 names", id="hard link"),
    pytest.param(_writable, "other users may write to", id="writable"),
    pytest.param(lambda path: os.mkfifo(path, 0o600), "is no ordinary file", id="pipe"),
    pytest.param(_of_another, "belongs to another user", id="another user", marks=needs_root),
]


@pytest.mark.parametrize(("put", "reason"), FILES)
def test_a_file_that_another_may_have_made_is_refused_and_left(
    tmp_path: Path, put: Callable[[Path], None], reason: str
) -> None:
    put(tmp_path / "file")
    there = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SourceError, match=reason):
        opened(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert all(path.read_text() == "kept" for path in tmp_path.glob("mine"))


def test_a_pipe_is_refused_without_waiting_for_who_writes_to_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file", 0o600)
    child = os.fork()
    if not child:
        signal.alarm(20)  # which ends a process that waits
        with contextlib.suppress(SourceError):
            opened(tmp_path / "file", os.O_RDONLY)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_only_read_may_have_a_second_name(tmp_path: Path) -> None:
    _hard_link(tmp_path / "file")
    opened(tmp_path / "file", os.O_RDONLY)


def test_what_was_opened_is_looked_at_and_not_what_has_its_name_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the path, before or after, would see another file than the one that is read."""
    path, real_open = tmp_path / "file", os.open
    _writable(path)
    opened(tmp_path / "fine")

    def swap(*arguments: object) -> int:
        descriptor: int = real_open(*arguments)  # type: ignore[arg-type]
        (tmp_path / "fine").replace(path)
        return descriptor

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(SourceError, match="other users may write to"):
        open_file(str(path), os.O_RDWR)


def _open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def _folder_of_another(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, NOBODY, NOBODY)


def _link_of_another(path: Path) -> None:
    (path.parent / "mine").mkdir(0o700)
    path.symlink_to("mine")
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _link_to_another(path: Path) -> None:
    _folder_of_another(path.parent / "theirs")
    path.symlink_to("theirs")


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        pytest.param(_open_folder, "other users may write in", id="writable"),
        pytest.param(_folder_of_another, "belongs to another user", id="another user", marks=needs_root),
        pytest.param(_link_of_another, "is a link of another user", id="another user's link", marks=needs_root),
        pytest.param(_link_to_another, "belongs to another user", id="link to another's", marks=needs_root),
    ],
)
def test_a_folder_that_others_may_change_is_refused(tmp_path: Path, put: Callable[[Path], None], reason: str) -> None:
    put(tmp_path / "folder")
    with pytest.raises(SourceError, match=reason):
        make_folder(str(tmp_path / "folder"))


def test_a_link_of_this_user_to_a_folder_of_theirs_is_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(0o755)
    (tmp_path / "folder").symlink_to("scratch")
    assert not make_folder(str(tmp_path / "folder"))


def test_a_folder_that_has_to_be_closed_is_refused_where_others_may_enter_it_and_as_a_link(tmp_path: Path) -> None:
    assert make_folder(str(tmp_path / "folder"), closed=True)
    assert not make_folder(str(tmp_path / "folder"), closed=True)
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(SourceError, match="have access to"):
        make_folder(str(tmp_path / "link"), closed=True)
    (tmp_path / "folder").chmod(0o710)
    with pytest.raises(SourceError, match="have access to"):
        make_folder(str(tmp_path / "folder"), closed=True)
    assert not make_folder(str(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        pytest.param(_hard_link, "a second name", id="hard link"),
        pytest.param(_link, "neither a file nor a folder", id="link"),
        pytest.param(lambda path: os.mkfifo(path), "neither a file nor a folder", id="pipe"),
        pytest.param(_of_another, "belongs to another user", id="another user", marks=needs_root),
    ],
)
def test_a_tree_with_something_of_others_is_refused(tmp_path: Path, put: Callable[[Path], None], reason: str) -> None:
    make_folder(str(tmp_path / "tree" / "inner"))
    (tmp_path / "tree" / "inner" / "fine").touch(0o666)
    check_tree(str(tmp_path / "tree"))
    put(tmp_path / "tree" / "inner" / "odd")
    with pytest.raises(SourceError, match=reason):
        check_tree(str(tmp_path / "tree"))
