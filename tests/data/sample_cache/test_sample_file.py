"""The file of samples: whatever is killed, cut off, overwritten or full, no sample in it is wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import SourceError
from penstock.data.sample_cache import sample_file
from penstock.data.sample_cache.sample_file import SampleFile

PLACES = 8
MARK = bytes(range(32))


def opened(path: Path, *, places: int = PLACES, mark: bytes = MARK, limit_nbytes: int = 1 << 20) -> SampleFile:
    file = SampleFile(partial(os.open, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), 0, places, str(path))
    file.limit_nbytes = limit_nbytes
    file.begin(mark)
    return file


def content(place: int) -> bytes:
    return bytes([place + 1]) * (100 + place)


def add(file: SampleFile, place: int) -> bool:
    return file.add(place, [content(place)[:30], content(place)[30:]], instead_of=None, has_crc=True)


def read(file: SampleFile, place: int) -> bytes | None:
    entry = file.entry(place)
    found = None if entry is None else file.read(entry, is_checked=True)
    return None if found is None else found.tobytes()


def in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process, and return the signal that ended it."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def test_what_was_added_is_there_for_all_who_open_the_file(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "a"), opened(tmp_path / "a")
    assert all(add(file, place) for place, file in enumerate([one, other, one]))
    assert [read(other, place) for place in range(4)] == [content(0), content(1), content(2), None]
    assert read(opened(tmp_path / "a"), 1) == content(1)
    assert one.filled() == (3, sum(len(content(place)) for place in range(3)))


def killed_at(write: int, *, half: bool = False) -> None:
    """Have this process killed at its write of that number: before it, or when half of it is done."""
    left, whole = [write], {name: getattr(os, name) for name in ("pwrite", "pwritev")}

    def written(name: str, fd: int, data: Any, at: int) -> int:
        if left[0] == 0:
            joined = b"".join(data) if name == "pwritev" else bytes(data)
            if half and len(joined) > 64:  # what is shorter than a page is not torn by a kill
                whole["pwrite"](fd, joined[: len(joined) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return whole[name](fd, data, at)

    for name in whole:
        setattr(sample_file.os, name, partial(written, name))


@pytest.mark.parametrize("half", [False, True], ids=["before", "in the middle of"])
@pytest.mark.parametrize("write", range(3))
def test_a_process_that_is_killed_at_a_write_leaves_no_wrong_sample(tmp_path: Path, write: int, half: bool) -> None:
    file = opened(tmp_path / "a")
    add(file, 0)

    def killed() -> None:
        killed_at(write, half=half)
        add(file, 1)

    assert in_child(killed) == signal.SIGKILL
    for one in (file, opened(tmp_path / "a")):
        assert [read(one, place) for place in range(2)] == [content(0), None]
    assert all(add(file, place) for place in range(1, PLACES))  # the lock is free
    assert [read(file, place) for place in range(PLACES)] == [content(place) for place in range(PLACES)]


def test_a_write_that_the_system_cuts_short_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, whole = opened(tmp_path / "a"), os.pwrite
    monkeypatch.setattr(sample_file.os, "pwritev", lambda fd, data, at: whole(fd, b"".join(data)[:35], at))
    monkeypatch.setattr(sample_file.os, "pwrite", lambda fd, data, at: whole(fd, bytes(data)[:50], at))
    assert add(file, 3)
    assert read(file, 3) == content(3)


@pytest.mark.parametrize("write", range(2))
def test_a_file_whose_maker_was_killed_is_made_anew(tmp_path: Path, write: int) -> None:
    def killed() -> None:
        killed_at(write)
        opened(tmp_path / "a")

    assert in_child(killed) == signal.SIGKILL
    file = opened(tmp_path / "a")
    assert file.filled() == (0, 0)
    assert add(file, 3)
    assert read(file, 3) == content(3)


def test_a_damaged_file_has_missing_samples_and_no_wrong_ones(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for place in range(PLACES):
        add(opened(path), place)
    whole = path.read_bytes()
    lost = 0
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            file = opened(path)
        except SourceError:
            continue
        found = [read(file, place) for place in range(PLACES)]
        assert all(one in (None, content(place)) for place, one in enumerate(found))
        lost += found.count(None)
    assert lost > 20
    for size in range(sample_file.table_nbytes(PLACES), len(whole), 91):
        path.write_bytes(whole[:size])
        file = opened(path)
        assert all(read(file, place) in (None, content(place)) for place in range(PLACES))


def replaced(path: Path, how: str) -> None:
    path.unlink()
    if how == "replaced":
        other = opened(path)
        other.add(0, [b"of another dataset"], instead_of=None, has_crc=True)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_forked_process_reads_and_fills_the_file_of_its_parent_whatever_has_its_path(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "a"
    file = opened(path)
    add(file, 0)
    replaced(path, how)

    def fill() -> None:
        assert read(file, 0) == content(0)
        assert add(file, 1)

    in_fork(lambda: in_fork(fill))
    assert [read(file, place) for place in range(3)] == [content(0), content(1), None]
    assert path.exists() == (how == "replaced")


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_without_proc_a_forked_process_refuses_another_file_at_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path, whole = tmp_path / "a", os.open
    file = opened(path)
    add(file, 0)

    def without_proc(name: Any, *arguments: Any) -> int:
        if str(name).startswith("/proc"):
            raise FileNotFoundError(name)
        return whole(name, *arguments)

    monkeypatch.setattr(os, "open", without_proc)
    in_fork(lambda: read(file, 0) == content(0) or os._exit(1))
    replaced(path, how)

    def child() -> None:
        with pytest.raises(SourceError, match=f"a was {how} .*leave the file until the program ends"):
            read(file, 0)

    if how == "removed":  # what opens a file in these tests makes a missing one, and a cache does not
        file._reopen = partial(os.open, path, os.O_RDWR)
    in_fork(child)


def in_fork(work: Callable[[], Any]) -> None:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()


def test_a_damaged_sample_is_replaced(tmp_path: Path) -> None:
    file = opened(tmp_path / "a")
    add(file, 2)
    entry = file.entry(2)
    assert entry is not None
    with (tmp_path / "a").open("r+b") as raw:
        raw.seek(entry[0])
        raw.write(b"x")
    assert read(file, 2) is None
    assert file.add(2, [content(2)], instead_of=entry, has_crc=True)
    assert read(file, 2) == content(2)
    assert file.filled()[0] == 1


def test_an_end_that_is_older_than_the_content_overwrites_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path / "a")
    add(file, 0)
    head = (tmp_path / "a").read_bytes()[:4096]
    add(file, 1)
    with (tmp_path / "a").open("r+b") as raw:  # as a power failure may leave it
        raw.write(head)
    again = opened(tmp_path / "a")
    assert add(again, 2)
    assert [read(again, place) for place in range(3)] == [content(0), content(1), content(2)]


def test_an_entry_that_another_process_has_made_meanwhile_is_kept(tmp_path: Path) -> None:
    file = opened(tmp_path / "a")
    add(file, 2)
    first = file.entry(2)
    assert file.add(2, [b"other"], instead_of=None, has_crc=True)
    assert file.entry(2) == first


def test_other_files_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a"
    opened(path)
    for reason, options in (
        ("a dataset of 8, and this one has 9", {"places": 9}),
        ("another dataset: of other classes", {"mark": bytes(32)}),
    ):
        with pytest.raises(SourceError, match=reason):
            opened(path, **options)  # type: ignore[arg-type]
    for other in (b"weights", bytes(5000), bytes(100)):
        path.write_bytes(other)
        with pytest.raises(SourceError, match="is no cache of samples; remove the file"):
            opened(path)
        assert path.read_bytes() == other


def test_a_file_takes_no_more_than_its_limit(tmp_path: Path) -> None:
    file = opened(tmp_path / "a", limit_nbytes=250)
    assert [add(file, place) for place in range(3)] == [True, True, False]
    assert read(file, 2) is None
    larger = opened(tmp_path / "a", limit_nbytes=10_000)
    assert add(larger, 2)
    assert read(file, 2) == content(2)


def test_processes_and_threads_that_add_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    count = 200
    file = opened(tmp_path / "a", places=count)

    def fill(first: int) -> None:
        for step in range(count):
            add_number(file, (first + step) % count)

    def add_number(one: SampleFile, place: int) -> None:
        one.add(place, [place.to_bytes(4, "little") * 30], instead_of=None, has_crc=True)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(first,)) for first in (0, 50, 120)]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=fill, args=(first,)) for first in (10, 180)]
    for thread in threads:
        thread.start()
    for one in (*threads, *processes):
        one.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    for process in processes:
        process.close()
    assert [read(file, place) for place in range(count)] == [place.to_bytes(4, "little") * 30 for place in range(count)]
    assert file.filled()[0] == count
