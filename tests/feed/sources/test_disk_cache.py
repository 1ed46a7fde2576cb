"""The cache on a disk: one download for all who want a file, nothing half, nothing temporary left, never too large."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import SourceError
from penstock.feed.sources.cache import Cache, Filling, default_folder, name_of
from penstock.feed.sources.cache_copying import CopyingFile

FORK = multiprocessing.get_context("fork")
BODY = bytes(range(250)) * 4  # 1000 bytes


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"), 3500)


def names(cache: Cache) -> list[str]:
    return sorted(name for name in os.listdir(cache.folder) if name not in ("lock", "users"))


def kept(cache: Cache, name: str) -> None:
    """Have a copy that nobody was given the path of."""
    filling = cache.begin(name, 1000)
    assert filling is not None
    body(filling)
    filling.finish()


def used(cache: Cache, name: str, time: float | None = None) -> None:
    if time is not None:
        os.utime(os.path.join(cache.folder, name), (time, time))
        return
    file = cache.open(name, 1000)
    assert file is not None
    file.close()


def body(filling: Filling) -> None:
    filling.write(BODY[:400])
    filling.write(BODY[400:])


def never(filling: Filling) -> None:
    raise AssertionError("there is a copy")


def test_a_copy_is_made_once(cache: Cache) -> None:
    path = cache.path("a", 1000, body)
    assert Path(path).read_bytes() == BODY
    assert cache.path("a", 1000, never) == path
    file = cache.open("a", 1000)
    assert file is not None
    with file:
        assert file.read() == BODY
    assert names(cache) == ["a"]


def test_there_is_no_copy_of_another_size(cache: Cache) -> None:
    cache.path("a", 1000, body)
    assert cache.open("a", 999) is None
    assert cache.open("b", 1000) is None


def test_many_threads_make_one_copy(cache: Cache) -> None:
    begun = []

    def slowly(filling: Filling) -> None:
        begun.append(threading.get_ident())
        body(filling)

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: cache.path("a", 1000, slowly), range(8)))
    assert len(begun) == 1
    assert len(set(paths)) == 1


def test_a_process_waits_for_another_one_that_makes_the_copy(cache: Cache) -> None:
    ready, begun = FORK.Event(), FORK.Event()
    child = FORK.Process(target=_make_when_told, args=(cache, begun, ready))
    child.start()
    begun.wait()
    threading.Timer(0.05, ready.set).start()
    assert Path(cache.path("a", 1000, never)).read_bytes() == BODY
    child.join()
    child.close()


def _make_when_told(cache: Cache, begun: Any, ready: Any) -> None:
    def write(filling: Filling) -> None:
        begun.set()
        ready.wait()
        body(filling)

    cache.path("a", 1000, write)


@pytest.mark.parametrize("written", [0, 1, 999, 1000])
def test_a_process_that_is_killed_leaves_nothing_half(cache: Cache, written: int) -> None:
    begun = FORK.Event()
    child = FORK.Process(target=_make_and_hang, args=(cache, written, begun))
    child.start()
    begun.wait()
    assert names(cache) == ["a.part"]
    waiting = ThreadPoolExecutor(1)
    path = waiting.submit(cache.path, "a", 1000, body)
    os.kill(child.pid or 0, signal.SIGKILL)
    assert Path(path.result(10)).read_bytes() == BODY
    assert names(cache) == ["a"]
    waiting.shutdown()
    child.join()
    child.close()


@pytest.mark.parametrize("in_passing", [False, True])
def test_what_a_killed_process_left_is_removed_for_the_next_file(cache: Cache, in_passing: bool) -> None:
    begun = FORK.Event()
    child = FORK.Process(target=_make_and_hang, args=(cache, 500, begun, in_passing))
    child.start()
    begun.wait()
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    child.close()
    assert names(cache) == ["a.read.part" if in_passing else "a.part"]
    cache.path("b", 1000, body)
    assert names(cache) == ["b"]


def _make_and_hang(cache: Cache, written: int, begun: Any, in_passing: bool = False) -> None:
    filling = cache.begin("a", 1000, in_passing=in_passing)
    assert filling is not None
    filling.write(BODY[:written])
    begun.set()
    signal.pause()


def test_a_copy_that_is_being_made_is_left_alone(cache: Cache) -> None:
    filling = cache.begin("a", 1000)
    assert filling is not None
    cache.path("b", 1000, body)
    assert names(cache) == ["a.part", "b"]
    body(filling)
    filling.finish()
    assert names(cache) == ["a", "b"]


def test_a_copy_that_fails_leaves_nothing_and_the_next_one_tries_again(cache: Cache) -> None:
    def fails(filling: Filling) -> None:
        filling.write(b"half")
        raise SourceError("cut")

    with pytest.raises(SourceError, match="cut"):
        cache.path("a", 1000, fails)
    assert names(cache) == []
    with pytest.raises(SourceError, match="has 4 bytes instead of 1000"):
        cache.path("a", 1000, lambda filling: filling.write(b"half"))
    assert names(cache) == []
    assert Path(cache.path("a", 1000, body)).read_bytes() == BODY


def test_the_least_recently_used_copies_make_room(cache: Cache) -> None:
    for at, name in enumerate("abc"):
        kept(cache, name)
        used(cache, name, at)
    used(cache, "a")
    kept(cache, "d")
    assert names(cache) == ["a", "c", "d"]


def test_a_copy_that_is_read_is_not_removed(cache: Cache) -> None:
    for at, name in enumerate("abc"):
        kept(cache, name)
        used(cache, name, at)
    file = cache.open("a", 1000)
    assert file is not None
    used(cache, "a", 0)
    with file:
        kept(cache, "d")
        assert names(cache) == ["a", "c", "d"]
        assert file.read() == BODY
    kept(cache, "e")
    assert names(cache) == ["c", "d", "e"]


def test_a_copy_whose_path_was_given_stays_while_the_process_lives(cache: Cache) -> None:
    child = FORK.Process(target=cache.path, args=("a", 1000, body))
    child.start()
    child.join()
    child.close()
    path = cache.path("b", 1000, body)
    for name in "cdef":
        kept(cache, name)
    assert names(cache) == ["b", "e", "f"]
    assert Path(path).read_bytes() == BODY
    assert len(os.listdir(os.path.join(cache.folder, "users"))) == 1, "and the note of who has ended is gone"


def test_a_process_of_another_machine_is_believed_for_a_day(cache: Cache) -> None:
    for name in "abc":
        kept(cache, name)
    note = Path(cache.folder) / "users" / "elsewhere-1.17.4711"
    note.parent.mkdir(exist_ok=True)
    note.write_text("a\nb\nc\n")
    with pytest.raises(SourceError, match="full of files that are in use"):
        kept(cache, "d")
    os.utime(note, (0, 0))
    kept(cache, "d")
    assert not note.exists()


def test_a_copy_that_is_open_keeps_its_bytes_when_it_is_removed(cache: Cache) -> None:
    kept(cache, "a")
    with open(os.path.join(cache.folder, "a"), "rb") as file:
        for name in "bcd":
            kept(cache, name)
        assert names(cache) == ["b", "c", "d"]
        assert file.read() == BODY


def test_a_cache_full_of_files_in_use_says_so(cache: Cache) -> None:
    for name in "abc":
        cache.path(name, 1000, body)
    with pytest.raises(SourceError, match="full of files that are in use; raise cache_nbytes by 500 or more"):
        cache.path("d", 1000, body)
    assert names(cache) == ["a", "b", "c"]


def test_copies_that_are_being_made_count(cache: Cache) -> None:
    fillings = [cache.begin(name, 1000) for name in "abc"]
    with pytest.raises(SourceError, match="may hold 3500"):
        cache.begin("d", 1000)
    for filling in fillings:
        assert filling is not None
        filling.close()
    assert names(cache) == []


def test_a_file_larger_than_the_cache_is_refused(cache: Cache) -> None:
    with pytest.raises(SourceError, match=r"needs 4000 bytes, and the cache .* may hold 3500; raise cache_nbytes"):
        cache.path("a", 4000, never)


def test_a_full_disk_says_what_was_needed_and_what_there_was(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(SourceError, match=r"needs 1000 bytes, and the disk of .* has \d+ free; .* cache="):
            cache.path("a", 1000, body)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
        with pytest.raises(SourceError, match=r"needs 1000 bytes, and the disk of .* has 10 free"):
            cache.path("a", 1000, never)
    assert names(cache) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match=r"cannot be made in .*; name another folder: cache="):
        Cache(str(tmp_path / "file"), 5000).path("a", 1000, body)


def test_names_tell_versions_apart_and_end_as_the_file_does() -> None:
    url = "s3://bucket/a%20b/train.tar.gz?versionId=1"
    assert name_of(url, 1, "x").endswith("-train.tar.gz")
    assert len({name_of(url, 1, "x"), name_of(url, 1, "y"), name_of(url, 2, "x"), name_of(url + "2", 1, "x")}) == 4
    assert "/" not in name_of("s3://bucket/../../x", 1, "")
    assert len(name_of("s3://bucket/" + "x" * 1000, 1, "")) < 255


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == "/somewhere/penstock/remote"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_folder() == "/home/somebody/.cache/penstock/remote"


def test_many_processes_that_are_killed_at_any_moment_leave_a_whole_cache(cache: Cache) -> None:
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
    kept(cache, "z")
    assert not [name for name in names(cache) if name.endswith(".part")]
    for name in names(cache):
        assert name == "z" or (Path(cache.folder) / name).read_bytes() == name.encode() * 1000


def _worker(cache: Cache, seed: int) -> Any:
    child = FORK.Process(target=_work, args=(cache, seed))
    child.start()
    return child


def _work(cache: Cache, seed: int) -> None:
    chance = random.Random(seed)
    while True:
        name = chance.choice("abcdef")
        file = cache.open(name, 1000)
        if file is not None:
            with file:
                assert file.read() == name.encode() * 1000
            continue
        try:
            filling = cache.begin(name, 1000, in_passing=chance.random() < 0.5)
        except SourceError:  # two are being read, and one is being made
            continue
        if filling is not None:
            with filling:
                for _ in range(10 if chance.random() < 0.8 else 5):
                    filling.write(name.encode() * 100)
                if filling.written == 1000:
                    filling.finish()


# ── copies made while a file is read ────────────────────────────────────────────────────────────────────────


def copying(cache: Cache, name: str = "a", *, has_rest: bool = False) -> CopyingFile:
    filling = cache.begin(name, 1000, in_passing=True)
    assert filling is not None
    return CopyingFile(_Raw(BODY), filling, lambda start: has_rest)


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


def test_a_file_that_is_read_to_its_end_is_kept(cache: Cache) -> None:
    with io.BufferedReader(copying(cache), 64) as file:
        assert file.read(150) == BODY[:150]
        file.seek(10)
        assert file.read() == BODY[10:]
    assert names(cache) == ["a"]
    assert (Path(cache.folder) / "a").read_bytes() == BODY


def test_a_file_that_is_not_read_to_its_end_is_kept_if_the_rest_is_here(cache: Cache) -> None:
    with copying(cache) as file:
        file.read(50)
    assert names(cache) == []
    with copying(cache, has_rest=True) as file:
        file.read(50)
    assert names(cache) == ["a"]
    assert (Path(cache.folder) / "a").read_bytes() == BODY


def test_a_gap_is_not_kept(cache: Cache) -> None:
    with copying(cache) as file:
        file.read(50)
        file.seek(500)
        assert file.readall() == BODY[500:]
    assert names(cache) == []


def test_a_file_is_copied_by_one_reader_and_nobody_waits_for_it(cache: Cache) -> None:
    with copying(cache) as file:
        assert cache.begin("a", 1000, in_passing=True) is None
        assert Path(cache.path("a", 1000, body)).read_bytes() == BODY
        assert file.readall() == BODY
    assert names(cache) == ["a"]


def test_a_full_disk_does_not_stop_a_reader(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with copying(cache) as file, pytest.warns(RuntimeWarning, match="not kept: .* needs 1000 bytes"):
        assert file.readall() == BODY
    assert names(cache) == []


def test_a_forked_child_leaves_its_parents_copy_alone(cache: Cache) -> None:
    with copying(cache) as file:
        assert file.read(100) == BODY[:100]
        child = FORK.Process(target=file.close)
        child.start()
        child.join()
        child.close()
        assert file.readall() == BODY[100:]
    assert (Path(cache.folder) / "a").read_bytes() == BODY
