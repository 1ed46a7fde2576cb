"""The cache on a disk: one download for all who want a file, nothing half, nothing temporary left, never too large."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from other_users import NOBODY, needs_root

from penstock.core.errors import SourceError
from penstock.data.storage.backend import FileVersion
from penstock.data.storage.cache import disk_cache
from penstock.data.storage.cache.cache_fill import CopyingFile
from penstock.data.storage.cache.disk_cache import DiskCache, copy_name, user_folder
from penstock.data.storage.cache.partial_copy import PartialCopy

FORK = multiprocessing.get_context("fork")
BODY = bytes(range(250)) * 4  # 1000 bytes


@pytest.fixture(autouse=True)
def _short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_COPY", re.compile(r"[a-z]\b|[0-9]{3}$"))


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(str(tmp_path / "cache"), 3500)


def names(cache: DiskCache) -> list[str]:
    return sorted(name for name in os.listdir(cache.folder) if name not in ("lock", "leases"))


def keep_copy(cache: DiskCache, name: str) -> None:
    """Have a copy that nobody was given the path of."""
    copy = cache.begin_copy(name, 1000)
    assert copy is not None
    write_body(copy)
    copy.finish()


def use_copy(cache: DiskCache, name: str, time: float | None = None) -> None:
    if time is not None:
        path = os.path.join(cache.folder, name)
        os.utime(path, (time, os.stat(path).st_mtime))
        return
    file = cache.open(name, 1000)
    assert file is not None
    file.close()


def write_body(copy: PartialCopy) -> None:
    copy.write(BODY[:400])
    copy.write(BODY[400:])


def fail_if_called(copy: PartialCopy) -> None:
    raise AssertionError("there is a copy")


def test_a_copy_is_made_once(cache: DiskCache) -> None:
    path = cache.path("a", 1000, write_body)
    assert Path(path).read_bytes() == BODY
    assert cache.path("a", 1000, fail_if_called) == path
    file = cache.open("a", 1000)
    assert file is not None
    with file:
        assert file.read() == BODY
    assert names(cache) == ["a"]


def test_there_is_no_copy_of_another_size(cache: DiskCache) -> None:
    cache.path("a", 1000, write_body)
    assert cache.open("a", 999) is None
    assert cache.open("b", 1000) is None


def test_many_threads_make_one_copy(cache: DiskCache) -> None:
    begun = []

    def slowly(copy: PartialCopy) -> None:
        begun.append(threading.get_ident())
        write_body(copy)

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: cache.path("a", 1000, slowly), range(8)))
    assert len(begun) == 1
    assert len(set(paths)) == 1


def test_a_process_waits_for_another_one_that_makes_the_copy(cache: DiskCache) -> None:
    ready, begun = FORK.Event(), FORK.Event()
    child = FORK.Process(target=_make_when_told, args=(cache, begun, ready))
    child.start()
    begun.wait()
    threading.Timer(0.05, ready.set).start()
    assert Path(cache.path("a", 1000, fail_if_called)).read_bytes() == BODY
    child.join()
    child.close()


def _make_when_told(cache: DiskCache, begun: Any, ready: Any) -> None:
    def write(copy: PartialCopy) -> None:
        begun.set()
        ready.wait()
        write_body(copy)

    cache.path("a", 1000, write)


@pytest.mark.parametrize("written", [0, 1, 999, 1000])
def test_a_killed_process_leaves_no_incomplete_copy(cache: DiskCache, written: int) -> None:
    begun = FORK.Event()
    child = FORK.Process(target=_make_and_hang, args=(cache, written, begun))
    child.start()
    begun.wait()
    assert names(cache) == ["a.part"]
    waiting = ThreadPoolExecutor(1)
    path = waiting.submit(cache.path, "a", 1000, write_body)
    os.kill(child.pid or 0, signal.SIGKILL)
    assert Path(path.result(10)).read_bytes() == BODY
    assert names(cache) == ["a"]
    waiting.shutdown()
    child.join()
    child.close()


@pytest.mark.parametrize("while_reading", [False, True])
def test_what_a_killed_process_left_is_removed_for_the_next_file(cache: DiskCache, while_reading: bool) -> None:
    begun = FORK.Event()
    child = FORK.Process(target=_make_and_hang, args=(cache, 500, begun, while_reading))
    child.start()
    begun.wait()
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    child.close()
    assert names(cache) == ["a.read.part" if while_reading else "a.part"]
    cache.path("b", 1000, write_body)
    assert names(cache) == ["b"]


def _make_and_hang(cache: DiskCache, written: int, begun: Any, while_reading: bool = False) -> None:
    copy = cache.begin_copy("a", 1000, while_reading=while_reading)
    assert copy is not None
    copy.write(BODY[:written])
    begun.set()
    signal.pause()


def test_a_copy_that_is_being_made_is_left_alone(cache: DiskCache) -> None:
    copy = cache.begin_copy("a", 1000)
    assert copy is not None
    cache.path("b", 1000, write_body)
    assert names(cache) == ["a.part", "b"]
    write_body(copy)
    copy.finish()
    assert names(cache) == ["a", "b"]


def test_a_copy_that_fails_leaves_nothing_and_the_next_one_tries_again(cache: DiskCache) -> None:
    def fails(copy: PartialCopy) -> None:
        copy.write(b"half")
        raise SourceError("cut")

    with pytest.raises(SourceError, match="cut"):
        cache.path("a", 1000, fails)
    assert names(cache) == []
    with pytest.raises(SourceError, match="has 4 bytes instead of 1000"):
        cache.path("a", 1000, lambda copy: copy.write(b"half"))
    assert names(cache) == []
    assert Path(cache.path("a", 1000, write_body)).read_bytes() == BODY


def test_the_least_recently_used_copies_make_room(cache: DiskCache) -> None:
    for at, name in enumerate("abc"):
        keep_copy(cache, name)
        use_copy(cache, name, at)
    use_copy(cache, "a")
    keep_copy(cache, "d")
    assert names(cache) == ["a", "c", "d"]


def test_the_files_are_not_listed_for_each_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, listed = DiskCache(str(tmp_path / "cache"), 100_000), []
    find = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or find(path))
    for number in range(100):
        keep_copy(cache, f"{number:03d}")
    assert listed.count(cache.folder) == 2, "before the first copy: for what processes have left, and for the sizes"
    for number in range(100, 109):
        keep_copy(cache, f"{number:03d}")
    assert listed.count(cache.folder) == 6, "a full cache makes room for several at once"
    assert sum(os.path.getsize(os.path.join(cache.folder, name)) for name in names(cache)) <= 100_000


def test_a_number_of_bytes_that_was_not_written_whole_is_counted_again(cache: DiskCache) -> None:
    keep_copy(cache, "a")
    (Path(cache.folder) / "lock").write_bytes(b"\1")
    for name in "bcd":
        keep_copy(cache, name)
    assert len(names(cache)) == 3, "as many as fit"


def test_files_of_others_in_the_folder_are_neither_counted_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    cache = DiskCache(str(tmp_path), 2000)
    others = [tmp_path / name for name in ("thesis.tex", "film.mkv.part", "0123456789abcdef01234567.log")]
    for other in others:
        other.write_bytes(BODY * 2)
        os.utime(other, (1, 1))
    copies = [copy_name("s3://bucket/a.tar", FileVersion(1000, version)) for version in "abc"]
    for name in copies:
        keep_copy(cache, name)
    assert [other.read_bytes() for other in others] == [BODY * 2] * 3
    assert [(tmp_path / name).exists() for name in copies] == [False, False, True]


def test_a_copy_that_is_read_is_not_removed(cache: DiskCache) -> None:
    for at, name in enumerate("abc"):
        keep_copy(cache, name)
        use_copy(cache, name, at)
    file = cache.open("a", 1000)
    assert file is not None
    use_copy(cache, "a", 0)
    with file:
        keep_copy(cache, "d")
        assert names(cache) == ["a", "c", "d"]
        assert file.read() == BODY
    use_copy(cache, "a", 0)
    keep_copy(cache, "e")
    assert names(cache) == ["c", "d", "e"]


def test_a_copy_whose_path_was_given_stays_while_the_process_lives(cache: DiskCache) -> None:
    child = FORK.Process(target=cache.path, args=("a", 1000, write_body))
    child.start()
    child.join()
    child.close()
    path = cache.path("b", 1000, write_body)
    for name in "cdef":
        keep_copy(cache, name)
    assert names(cache) == ["b", "e", "f"]
    assert Path(path).read_bytes() == BODY
    assert len(os.listdir(os.path.join(cache.folder, "leases"))) == 1, "and the note of who has ended is gone"


def test_leases_of_another_machine_hold_for_a_day(cache: DiskCache) -> None:
    for name in "abc":
        keep_copy(cache, name)
    note = Path(cache.folder) / "leases" / "elsewhere-1.17.4711"
    note.parent.mkdir(exist_ok=True)
    note.write_text("a\nb\nc\n")
    with pytest.raises(SourceError, match="full of files that are in use"):
        keep_copy(cache, "d")
    os.utime(note, (0, 0))
    keep_copy(cache, "d")
    assert not note.exists()


@pytest.mark.parametrize("at", [0, 7, 8, 999])
def test_a_flipped_byte_in_a_copy_is_found_and_the_file_is_fetched_anew(
    cache: DiskCache, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for open_copy in (lambda: cache.open("a", 1000), lambda: cache.path("a", 1000, write_body)):
        path = Path(cache.path("a", 1000, write_body))
        data = bytearray(path.read_bytes())
        data[at] ^= 64
        before = path.stat()
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        monkeypatch.setattr(disk_cache, "_checked", set())  # as in another process
        with pytest.warns(UserWarning, match="a copy of a remote file, was damaged; it is fetched anew"):
            found = open_copy()
        assert found is None or Path(found).read_bytes() == BODY
    cache.path("a", 1000, fail_if_called)


def test_a_copy_is_compared_once_by_a_process_and_those_that_it_forks(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def compare(descriptor: int, seconds: int) -> bool:
        compared.append(descriptor)
        return True

    def use_again() -> None:
        use_copy(cache, "a")
        use_copy(cache, "b")
        os._exit(len(compared))

    monkeypatch.setattr(disk_cache, "_is_intact", compare)
    cache.path("a", 1000, write_body)
    assert compared == [], "who makes a copy knows what is in it"
    keep_copy(cache, "b")
    use_copy(cache, "b")
    use_copy(cache, "b")
    assert len(compared) == 1
    worker = FORK.Process(target=use_again)
    worker.start()
    worker.join()
    assert worker.exitcode == 1
    worker.close()


def test_a_copy_that_is_open_keeps_its_bytes_when_it_is_removed(cache: DiskCache) -> None:
    keep_copy(cache, "a")
    with open(os.path.join(cache.folder, "a"), "rb") as file:
        for name in "bcd":
            keep_copy(cache, name)
        assert names(cache) == ["b", "c", "d"]
        assert file.read() == BODY


def test_a_cache_full_of_files_in_use_is_an_error(cache: DiskCache) -> None:
    for name in "abc":
        cache.path(name, 1000, write_body)
    with pytest.raises(SourceError, match="full of files that are in use; raise cache_nbytes by 500 or more"):
        cache.path("d", 1000, write_body)
    assert names(cache) == ["a", "b", "c"]


def test_copies_that_are_being_made_count(cache: DiskCache) -> None:
    copies = [cache.begin_copy(name, 1000) for name in "abc"]
    with pytest.raises(SourceError, match="may hold 3500"):
        cache.begin_copy("d", 1000)
    for copy in copies:
        assert copy is not None
        copy.close()
    assert names(cache) == []


def test_a_file_larger_than_the_cache_is_refused(cache: DiskCache) -> None:
    with pytest.raises(SourceError, match=r"needs 4000 bytes, and the cache .* may hold 3500; raise cache_nbytes"):
        cache.path("a", 4000, fail_if_called)


def test_a_full_disk_is_reported_with_needed_and_free_bytes(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(SourceError, match=r"needs 1000 bytes, and the disk of .* has \d+ free; .* cache="):
            cache.path("a", 1000, write_body)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
        with pytest.raises(SourceError, match=r"needs 1000 bytes, and the disk of .* has 10 free"):
            cache.path("a", 1000, fail_if_called)
    assert names(cache) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match=r"cannot be made in .*; choose another folder: cache="):
        DiskCache(str(tmp_path / "file"), 5000).path("a", 1000, write_body)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_copies_are_this_users_alone(cache: DiskCache) -> None:
    cache.path("a", 1000, write_body)
    with _reading(cache, "b"):
        modes = {
            path.relative_to(cache.folder).parts[0]: oct(path.stat().st_mode & 0o777)
            for path in Path(cache.folder).rglob("*")
            if path.is_file()
        }
    assert modes == dict.fromkeys(("a", "b.read.part", "lock", "leases"), "0o600")
    folders = [Path(cache.folder), Path(cache.folder, "leases")]
    assert [oct(folder.stat().st_mode & 0o777) for folder in folders] == ["0o700"] * 2


def _reading(cache: DiskCache, name: str) -> PartialCopy:
    copy = cache.begin_copy(name, 1000, while_reading=True)
    assert copy is not None
    return copy


def test_a_folder_that_others_may_write_in_is_refused(cache: DiskCache) -> None:
    keep_copy(cache, "a")
    os.chmod(cache.folder, 0o777)
    for use in (lambda: cache.open("a", 1000), lambda: cache.begin_copy("b", 1000)):
        with pytest.raises(SourceError, match=r"other users may write in .*chmod go-w"):
            use()


def _of_nobody(path: Path) -> None:
    path.write_bytes(BODY)
    path.chmod(0o644)
    os.chown(path, NOBODY, NOBODY)


def _link(path: Path) -> None:
    (path.parent / "mine").write_bytes(BODY)
    path.symlink_to("mine")


def _pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)
    os.chmod(path, 0o600)


PUT = [pytest.param(_of_nobody, marks=needs_root), _link, _pipe]


@pytest.mark.parametrize("put", PUT)
def test_a_copy_that_another_user_has_put_there_is_not_read(cache: DiskCache, put: Callable[[Path], None]) -> None:
    """It may have been put there while others could write in the folder."""
    keep_copy(cache, "b")
    put(Path(cache.folder, "a"))
    with pytest.raises(SourceError, match="remove it"):
        cache.open("a", 1000)


@pytest.mark.parametrize("put", PUT)
@pytest.mark.parametrize("name", ["a.part", "lock"])
def test_what_another_user_has_put_in_the_place_of_a_file_is_not_written_to(
    cache: DiskCache, put: Callable[[Path], None], name: str
) -> None:
    Path(cache.folder).mkdir(0o700)
    place = Path(cache.folder, name)
    put(place)
    with pytest.raises(SourceError, match="remove it"):
        cache.begin_copy("a", 1000)
    assert not place.is_file() or place.read_bytes() == BODY


def test_names_differ_by_version_and_end_as_the_file_does() -> None:
    url = "s3://bucket/a%20b/train.tar.gz?versionId=1"
    one = FileVersion(1, "x")
    kept = [copy_name(url, one), copy_name(url, FileVersion(1, "y")), copy_name(url, FileVersion(2, "x"))]
    assert all(name.endswith("-train.tar.gz") for name in kept)
    assert len({*kept, copy_name(url + "2", one)}) == 4
    assert "/" not in copy_name("s3://bucket/../../x", one)
    assert len(copy_name("s3://bucket/" + "x" * 1000, one)) < 255


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_folder("remote") == "/somewhere/penstock/remote"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert user_folder("remote") == "/home/somebody/.cache/penstock/remote"


def test_many_processes_that_are_killed_at_any_moment_leave_a_whole_cache(cache: DiskCache) -> None:
    children = [_worker(cache, seed) for seed in range(3)]
    for at in range(20):
        children.append(_worker(cache, 10 + at))
        time.sleep(0.03)
        victim = children.pop(0)
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
        assert victim.exitcode == -signal.SIGKILL, "it found a copy that is not whole"
        victim.close()
    for child in children:
        child.kill()
        child.join()
        child.close()
    keep_copy(cache, "z")
    assert not [name for name in names(cache) if name.endswith(".part")]
    for name in names(cache):
        assert name == "z" or (Path(cache.folder) / name).read_bytes() == name.encode() * 1000


def _worker(cache: DiskCache, seed: int) -> Any:
    child = FORK.Process(target=_work, args=(cache, seed))
    child.start()
    return child


def _work(cache: DiskCache, seed: int) -> None:
    chance = random.Random(seed)
    while True:
        name = chance.choice("abcdef")
        file = cache.open(name, 1000)
        if file is not None:
            with file:
                assert file.read() == name.encode() * 1000
            continue
        try:
            copy = cache.begin_copy(name, 1000, while_reading=chance.random() < 0.5)
        except SourceError:  # two are being read, and one is being made
            continue
        if copy is not None:
            with copy:
                for _ in range(10 if chance.random() < 0.8 else 5):
                    copy.write(name.encode() * 100)
                if copy.written == 1000:
                    copy.finish()


# ── copies made while a file is read ────────────────────────────────────────────────────────────────────────


def copying(cache: DiskCache, name: str = "a", *, has_rest: bool = False) -> CopyingFile:
    copy = cache.begin_copy(name, 1000, while_reading=True)
    assert copy is not None
    return CopyingFile(_Raw(BODY), copy, lambda start: has_rest)


class _Raw(io.RawIOBase):
    """Bytes as a raw file that gives at most 100 at a time."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(memoryview(buffer)[:100])

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def test_a_file_that_is_read_to_its_end_is_kept(cache: DiskCache) -> None:
    with io.BufferedReader(copying(cache), 64) as file:
        assert file.read(150) == BODY[:150]
        file.seek(10)
        assert file.read() == BODY[10:]
    assert names(cache) == ["a"]
    assert (Path(cache.folder) / "a").read_bytes() == BODY


def test_a_file_that_is_not_read_to_its_end_is_kept_if_the_rest_is_here(cache: DiskCache) -> None:
    with copying(cache) as file:
        file.read(50)
    assert names(cache) == []
    with copying(cache, has_rest=True) as file:
        file.read(50)
    assert names(cache) == ["a"]
    assert (Path(cache.folder) / "a").read_bytes() == BODY


def test_a_gap_is_not_kept(cache: DiskCache) -> None:
    with copying(cache) as file:
        file.read(50)
        file.seek(500)
        assert file.readall() == BODY[500:]
    assert names(cache) == []


def test_a_file_is_copied_by_one_reader_and_nobody_waits_for_it(cache: DiskCache) -> None:
    with copying(cache) as file:
        assert cache.begin_copy("a", 1000, while_reading=True) is None
        assert Path(cache.path("a", 1000, write_body)).read_bytes() == BODY
        assert file.readall() == BODY
    assert names(cache) == ["a"]


def test_a_full_disk_does_not_stop_a_reader(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with copying(cache) as file, pytest.warns(RuntimeWarning, match="not kept: .* needs 1000 bytes"):
        assert file.readall() == BODY
    assert names(cache) == []


def test_a_forked_child_leaves_its_parents_copy_alone(cache: DiskCache) -> None:
    with copying(cache) as file:
        assert file.read(100) == BODY[:100]
        child = FORK.Process(target=file.close)
        child.start()
        child.join()
        child.close()
        assert file.readall() == BODY[100:]
    assert (Path(cache.folder) / "a").read_bytes() == BODY
