"""Remote files: every byte once and in order, whatever the network does."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faulty_storage import FaultPlan, Files
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from penstock.core.errors import ExtraError, OptionError, RecordError, SourceError
from penstock.core.urls import redact_url
from penstock.data.storage.remote_errors import translate_error
from penstock.data.storage.retries import Retries, RetryBudget, TransientError
from penstock.data.storage.storage import Storage

pytestmark = pytest.mark.usefixtures("preloaded_python")

DATA = random.Random(0).randbytes(300_000)
QUICK = Storage(range_nbytes=20_000, stall_s=0.3, retries=6, timeout_s=20)


@pytest.fixture(autouse=True)
def _hang_up_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.data.storage.event_loop.LINGER_S", 0.05)


@pytest.fixture
def files() -> Iterator[Files]:
    with Files({"/a.bin": DATA, "/dir/b.bin": b"b", "/dir/c.bin": b"c", "/empty": b""}).running() as server:
        yield server


def ranges(server: Files) -> list[str]:
    """Return the ranges that were asked for, without the question for the size."""
    return [wanted for _, _, wanted in server.requests if wanted != "bytes=0-0"]


def test_a_file_is_read_in_order_in_any_pieces(files: Files) -> None:
    sizes = random.Random(1)
    with QUICK.open(f"{files.url}/a.bin") as file:
        pieces = []
        while piece := file.read(sizes.choice([1, 7, 1000, 19_999, 20_000, 50_000])):
            pieces.append(piece)
    assert b"".join(pieces) == DATA
    assert sorted(ranges(files)) == sorted(f"bytes={start}-{start + 19_999}" for start in range(0, 300_000, 20_000))


def test_lines_can_be_read(files: Files) -> None:
    files.files["/lines"] = text = b"".join(b"%d\n" % number for number in range(20_000))
    with QUICK.open(f"{files.url}/lines") as file:
        assert list(file) == text.splitlines(keepends=True)


def test_a_file_is_read_from_anywhere(files: Files) -> None:
    places = random.Random(2)
    with QUICK.open(f"{files.url}/a.bin", 100) as file:
        assert file.read(5) == DATA[100:105]
        for _ in range(30):
            start, count = places.randrange(310_000), places.randrange(1, 30_000)
            assert file.seek(start) == start == file.tell()
            assert file.read(count) == DATA[start : start + count]
        assert file.seek(-3, os.SEEK_END) == 299_997
        assert file.read() == DATA[-3:]
        with pytest.raises(ValueError, match="-1"):
            file.seek(-1)


def test_an_empty_file_is_empty(files: Files) -> None:
    with QUICK.open(f"{files.url}/empty") as file:
        assert file.read() == b""
    assert QUICK.nbytes(f"{files.url}/empty") == 0


def test_ranges_are_fetched_concurrently_and_only_a_few_ahead(files: Files) -> None:
    with QUICK.open(f"{files.url}/a.bin") as file:
        file.read(20_001)  # the first range has been read
        files.range_barrier = threading.Barrier(4, action=lambda: setattr(files, "range_barrier", None))
        raw: Any = file.raw
        assert file.read(20_000 * 5) == DATA[20_001:120_001]
        assert files.range_barrier is None, "four were waiting at the same time"
        assert len(raw._ranges) <= 1 + QUICK.ahead


def test_reading_a_header_fetches_two_ranges(files: Files) -> None:
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read(100) == DATA[:100]
    assert len(ranges(files)) <= 2


@pytest.mark.parametrize("fault", ["500", "503", "cut", "reset", "stall", "slow", "short", "refuse"])
def test_transient_failures_are_retried(files: Files, fault: str) -> None:
    files.plan = FaultPlan([fault, "", fault, "", fault])
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read() == DATA


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_comes_once_whatever_happens(files: Files, seed: int) -> None:
    files.plan = FaultPlan(fault_rate=0.3, seed=seed)
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read() == DATA


def test_a_cut_answer_is_asked_for_again_from_where_it_broke_off(files: Files) -> None:
    files.plan = FaultPlan(["", "cut"])
    with Storage(range_nbytes=400_000, ahead=0).open(f"{files.url}/a.bin") as file:
        assert file.read() == DATA
    assert ranges(files) == ["bytes=0-299999", "bytes=150000-299999"]


def test_permanent_failures_raise_at_once(files: Files) -> None:
    with pytest.raises(SourceError, match=r"there is no file http://.*/none"):
        QUICK.open(f"{files.url}/none")
    assert len(files.requests) == 1


def test_attempts_are_bounded(files: Files) -> None:
    files.plan = FaultPlan(fault_rate=1.0, kinds=("503",))
    with pytest.raises(SourceError, match=r"a.bin cannot be read: the server answered HTTP 503; that was attempt 3"):
        Storage(retries=2).open(f"{files.url}/a.bin")
    assert len(files.requests) == 3


def test_time_is_bounded(files: Files) -> None:
    files.plan = FaultPlan(fault_rate=1.0, kinds=("500",))
    with pytest.raises(SourceError, match="timeout_s"):
        Storage(retries=1000, timeout_s=0.5).open(f"{files.url}/a.bin")
    assert len(files.requests) < 1000


def test_what_came_before_a_failure_is_given_first(files: Files) -> None:
    with Storage(range_nbytes=400_000, retries=0).open(f"{files.url}/a.bin") as file:
        raw: Any = file.raw
        files.plan = FaultPlan(["cut", "500"])
        buffer = bytearray(150_000)
        count = 0
        while count < 150_000:
            count += raw.readinto(memoryview(buffer)[count:])
        assert bytes(buffer) == DATA[:150_000]
        with pytest.raises(SourceError, match=r"ended|payload|answered"):
            raw.readinto(buffer)
        files.plan = FaultPlan()
        assert file.read() == DATA[150_000:], "and it can be gone on with"


def test_progress_resets_the_retry_budget() -> None:
    budget = RetryBudget(Retries(max_retries=1, timeout_s=100))
    for _ in range(5):
        assert budget.wait_s(TransientError("cut")) is not None
        budget.progress()
    assert budget.wait_s(TransientError("cut")) is not None
    assert budget.wait_s(TransientError("cut")) is None


def test_waits_grow_and_a_server_is_left_alone_as_long_as_it_asks() -> None:
    budget = RetryBudget(Retries(max_retries=20, timeout_s=1e6))
    waits = [budget.wait_s(TransientError("503")) or 0 for _ in range(10)]
    assert all(0.05 * 2**at <= wait <= 0.1 * 2**at for at, wait in enumerate(waits[:6]))
    assert max(waits) <= 10
    assert budget.wait_s(TransientError("503", 60.0)) == 60


def test_a_file_that_changes_is_an_error_and_no_mixture(files: Files) -> None:
    with QUICK.open(f"{files.url}/a.bin") as file:
        file.read(10)
        files.files["/a.bin"] = bytes(300_000)
        with pytest.raises(SourceError, match="was changed since it was opened"):
            file.read()


def test_a_file_that_grows_is_an_error_even_without_etags(files: Files) -> None:
    files.has_etags = False
    with QUICK.open(f"{files.url}/a.bin") as file:
        file.read(10)
        files.files["/a.bin"] = DATA + b"more"
        with pytest.raises(SourceError, match="was changed since it was opened"):
            file.read()


def test_a_memory_file_that_changes_is_an_error() -> None:
    fsspec.filesystem("memory").pipe("/changing", DATA)
    with QUICK.open("memory://changing") as file:
        file.read(10)
        fsspec.filesystem("memory").pipe("/changing", bytes(300_000))
        with pytest.raises(SourceError, match="was changed since it was opened"):
            file.read()
    fsspec.filesystem("memory").rm("/changing")


def test_a_memory_file_is_read() -> None:
    fsspec.filesystem("memory").pipe("/folder/a.bin", DATA)
    with QUICK.open("memory://folder/a.bin") as one, QUICK.open("memory://folder/a.bin", 1000) as other:
        assert one.read(50_000) == DATA[:50_000]
        assert other.read() == DATA[1000:]
        assert one.read() == DATA[50_000:]
    fsspec.filesystem("memory").rm("/folder", recursive=True)


def test_a_server_without_ranges_is_read_whole(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.has_ranges = False
    files.plan = FaultPlan(["", "cut", "500"])
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read() == DATA
    assert QUICK.nbytes(f"{files.url}/a.bin") == len(DATA)
    monkeypatch.setattr("penstock.data.storage.remote_file._WITHOUT_RANGES_NBYTES", 1000)
    with pytest.raises(SourceError, match="supports no ranges, and the file of 300000 bytes"):
        QUICK.open(f"{files.url}/a.bin")


def test_a_response_with_another_range_is_not_used(files: Files) -> None:
    honest = files.answer

    def lying(method: str, path: str, headers: Any) -> Any:
        status, told, worker_type = honest(method, path, headers)
        if len(files.requests) == 2:
            told["Content-Range"] = "bytes 7-20006/300000"
        return status, told, worker_type

    files.answer = lying  # type: ignore[method-assign]
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read() == DATA


def test_closing_does_not_wait_for_a_server_that_is_silent(files: Files) -> None:
    file = Storage(stall_s=30, range_nbytes=20_000).open(f"{files.url}/a.bin")
    files.plan = FaultPlan(fault_rate=1.0, kinds=("stall",))
    file.read(5000)
    file.close()
    assert files.stalls_over == 0
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_a_file_without_references_is_closed(files: Files) -> None:
    file = QUICK.open(f"{files.url}/a.bin")
    file.read(10)
    del file
    gc.collect()  # the fixture looks for the thread and the sockets


def test_connections_are_kept_between_files_and_no_thread_of_fsspec_begins(files: Files) -> None:
    for _ in range(3):
        with QUICK.open(f"{files.url}/a.bin") as file:
            assert file.read(10) == DATA[:10]
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("penstock remote") == 1
    assert "fsspecIO" not in names


def test_a_missing_package_is_named_with_its_extra(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ExtraError, match=r'pip install "penstock\[s3\]"'):
        Storage().open("s3://bucket/a")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ExtraError, match=r'pip install "penstock\[remote\]"'):
        Storage().open(f"{files.url}/a.bin")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ExtraError, match=r'pip install "penstock\[remote\]"'):
        Storage().nbytes("memory://a")


def test_a_scheme_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(SourceError, match="fsspec knows no what://"):
        Storage().open("what://bucket/a")


def test_a_host_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        Storage(retries=0).open("http://127.0.0.1:1/a")


def test_messages_show_no_secrets() -> None:
    assert redact_url("https://host/a?X-Amz-Signature=1") == "https://host/a?…"
    assert redact_url("ftp://me:secret@host/a") == "ftp://host/a"
    assert redact_url("s3://key:sec/ret@bucket/a") == "s3://bucket/a"
    assert redact_url("http://host:80/a@b") == "http://host:80/a@b"
    assert redact_url("hf://datasets/user/name@main/a") == "hf://datasets/user/name@main/a"


SIGNED = "http://me:secret@127.0.0.1:1/a.parquet?X-Amz-Signature=secret&X-Amz-Security-Token=secret"


@pytest.mark.parametrize(
    "error",
    [
        SourceError(f"the folder {SIGNED} has no file with a known suffix"),
        RecordError(SIGNED, 3, 0, f"not at {SIGNED!r}"),
        TransientError(f"Read timeout on endpoint URL: {SIGNED!r}"),
        translate_error(SIGNED, ValueError("bad name 'me:secret@127.0.0.1', GET /a.parquet?X-Amz-Signature=secret")),
    ],
)
def test_no_error_shows_what_is_secret_in_a_url_in_its_text(error: Exception) -> None:
    assert "127.0.0.1" in str(error)
    assert "secret" not in str(error)
    assert "secret" not in str(pickle.loads(pickle.dumps(error)))


def test_an_opened_signed_url_is_a_file_of_the_format_that_its_path_says(files: Files) -> None:
    files.files["/a.jsonl"] = b'{"x": 1}\n'
    assert [int(one["x"]) for one in penstock.open(f"{files.url}/a.jsonl?signature=secret", storage=QUICK)] == [1]
    with pytest.raises(SourceError, match=r"no file http://.*/b.jsonl\?… ") as raised:
        next(iter(penstock.open(f"{files.url}/b.jsonl?signature=secret", storage=QUICK)))
    assert "secret" not in str(raised.value)


def test_what_the_user_has_configured_for_fsspec_is_sent(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"Authorization": "Bearer token"}})
    honest, seen = files.answer, []
    files.answer = lambda *question: seen.append(question[2]["Authorization"]) or honest(*question)
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read() == DATA
    assert set(seen) == {"Bearer token"}


@pytest.mark.parametrize("options", [{"retries": -1}, {"timeout_s": 0}, {"stall_s": 0}, {"range_nbytes": 0}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Storage(**options)


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_forked_child_and_its_parent_both_continue_reading(files: Files) -> None:
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read(50_000) == DATA[:50_000]
        mine, theirs = multiprocessing.get_context("fork").Pipe(False)
        child = multiprocessing.get_context("fork").Process(target=_send_rest, args=(file, theirs))
        child.start()
        assert file.read() == DATA[50_000:]
        assert mine.recv() == DATA[50_000:]
        child.join()
        mine.close()
        theirs.close()
        child.close()


def _send_rest(file: Any, connection: Any) -> None:
    with file:
        connection.send(file.read())


class Slices(Dataset[bytes]):
    """Slice n of a remote file, opened for each."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> bytes:
        with QUICK.open(self.url, index * 25_000) as file:
            return file.read(25_000)


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
def test_workers_of_any_kind_read_remote_files(files: Files, loader: Any, context: str) -> None:
    files.plan = FaultPlan(fault_rate=0.2, seed=5)
    slices = Slices(f"{files.url}/a.bin")
    with QUICK.open(slices.url) as open_in_the_parent:
        assert open_in_the_parent.read(30_000) == DATA[:30_000]
        assert slices[0] == DATA[:25_000]
        batches = loader(slices, batch_size=2, num_workers=2, collate_fn=list, multiprocessing_context=context)
        assert b"".join(one for batch in batches for one in batch) == DATA
        assert open_in_the_parent.read() == DATA[30_000:]


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "import os; os.fork() or os._exit(0)"])
def test_a_program_ends_quietly_with_a_file_open(files: Files, end: str) -> None:
    script = f"""
from penstock.data.storage.storage import Storage
file = Storage(range_nbytes=1000).open({files.url + "/a.bin"!r})
file.read(5000)
{end}
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60)
    assert "Unclosed" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "Task was destroyed" not in done.stderr


# ── hostile servers ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_promises_an_answer_and_gives_none_is_not_waited_for(files: Files) -> None:
    honest = files.answer
    answers = iter([(100, {}, b""), (206, {"Transfer-Encoding": "chunked"}, b"")])
    files.answer = lambda *question: next(answers, None) or honest(*question)  # type: ignore[method-assign]
    with QUICK.open(f"{files.url}/a.bin") as file:
        assert file.read() == DATA


_ENDLESS_NBYTES = 256 << 20
"""What an endless server sends before a test fails rather than fill the memory."""
_FEW_NBYTES = 32 << 20
"""What the buffers of sockets may take, of several requests."""

ENDLESS = {
    "chunked": "HTTP/1.1 206 P\r\nContent-Range: bytes 0-7/8\r\nETag: e\r\nTransfer-Encoding: chunked\r\n\r\n",
    "without a length": "HTTP/1.1 206 P\r\nContent-Range: bytes 0-7/8\r\nETag: e\r\n\r\n",
    "whole": "HTTP/1.1 200 OK\r\nContent-Length: 8\r\nETag: e\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a folder": "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n",
}


@contextmanager
def endless(head: str) -> Iterator[tuple[str, list[int]]]:
    """Serve answers that never end; yield the URL, and how many bytes were taken of each."""
    piece = bytes(1 << 16)
    part = b"10000\r\n" + piece + b"\r\n" if "chunked" in head else piece
    sent: list[int] = []

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(head.encode())
            place = len(sent)
            sent.append(0)
            while sent[place] < _ENDLESS_NBYTES:
                connection.sendall(part)
                sent[place] += len(piece)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("kind", ["chunked", "without a length", "whole"])
@pytest.mark.parametrize("caches", [False, True])
def test_no_more_is_read_of_an_answer_than_it_announced(kind: str, caches: bool, tmp_path: Path) -> None:
    storage = Storage(cache=str(tmp_path / "cache") if caches else None, retries=1, stall_s=5)
    with endless(ENDLESS[kind]) as (url, sent):
        for read in (lambda: storage.read(f"{url}/a.bin", 100), lambda: _all_of(storage, f"{url}/a.bin")):
            with contextlib.suppress(SourceError):
                assert len(read()) == 8
    assert sent
    assert max(sent) < _FEW_NBYTES


def _all_of(storage: Storage, url: str) -> bytes:
    with storage.open(url) as file:
        return file.read()


def test_an_endless_page_of_a_folder_is_an_error() -> None:
    with endless(ENDLESS["a folder"]) as (url, sent), pytest.raises(SourceError, match="page of more than"):
        Storage(retries=0, stall_s=5).list(f"{url}/folder/")
    assert max(sent) < _ENDLESS_NBYTES


@pytest.mark.parametrize("seed", range(6))
def test_a_server_that_answers_nonsense_gives_no_foreign_error(seed: int) -> None:
    chance = random.Random(seed)
    storage = Storage(retries=1, stall_s=0.3, timeout_s=2, range_nbytes=500)
    with _Raw(chance).running() as port:
        for _ in range(15):
            with (
                contextlib.suppress(SourceError),
                storage.open(f"http://127.0.0.1:{port}/a") as file,
            ):
                assert file.read() == BODY


BODY = DATA[:1000]


class _Raw:
    """A server whose answers are right but for some bytes of their heads."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    @contextmanager
    def running(self) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.05)
            ended = threading.Event()
            thread = threading.Thread(target=self._serve, args=(server, ended))
            thread.start()
            try:
                yield server.getsockname()[1]
            finally:
                ended.set()
                thread.join()

    def _serve(self, server: socket.socket, ended: threading.Event) -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(0.5)
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        question = connection.recv(65536)
        wanted = re.search(rb"bytes=(\d+)-(\d+)", question)
        start, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(BODY))
        end = min(end, len(BODY))
        head = bytearray(
            b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-%d/%d\r\nContent-Length: %d\r\nETag: 1\r\n"
            b"Connection: close\r\n\r\n" % (start, end - 1, len(BODY), end - start)
        )
        for _ in range(self._chance.choice([0, 0, 1, 3])):
            head[self._chance.randrange(len(head))] = self._chance.randrange(256)
        connection.sendall(bytes(head) + BODY[start:end])
