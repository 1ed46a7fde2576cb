"""Storage: what a path stands for; and streams from an S3 server that fails: every sample exactly once."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, urlsplit

import fsspec
import numpy as np
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from bucket import Address, put, serving
from faulty_storage import FaultPlan, Files, Proxy
from sample_files import write_samples
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import SourceError
from penstock.data.storage.backend import mark_of_server
from penstock.data.storage.event_loop import acquire
from penstock.data.storage.storage import Storage, expand_braces, is_remote
from penstock.data.stream import Shard, Stream

pytestmark = pytest.mark.usefixtures("preloaded_python")

QUICK = Storage(range_nbytes=4096, stall_s=0.5, retries=10, timeout_s=30)
SHARDS, LINES = 5, 700


@pytest.fixture(autouse=True)
def _hang_up_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.data.storage.event_loop.LINGER_S", 0.05)
    QUICK._seen.clear()  # each test has another server, with other files of the same names


@pytest.fixture(scope="module")
def moto() -> Iterator[Address]:
    with serving() as address:
        put(address, {f"train/{shard}.txt": text(shard) for shard in range(SHARDS)})
        put(address, {"train/.hidden": b"", "train/more/what?.txt": b"what"})
        yield address


@pytest.fixture
def s3(moto: Address, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(*moto).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def http() -> Iterator[Files]:
    with Files({f"/train/{shard}.txt": text(shard) for shard in range(SHARDS)}).running() as server:
        yield server


def text(shard: int) -> bytes:
    return b"".join(b"shard %d, line %d%s\n" % (shard, line, b"." * (line % 50)) for line in range(LINES))


def everything() -> Counter[str]:
    return Counter(line for shard in range(SHARDS) for line in text(shard).decode().splitlines())


class Lines(Stream):
    """Lines of text files."""

    def __init__(self, paths: list[str], storage: Storage) -> None:
        super().__init__([Shard(path) for path in paths])
        self.storage = storage

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Any]:
        with self.storage.open(shard.name) as file:
            for number, line in enumerate(file):
                if number >= first and (number - first) % step == 0:
                    yield line.decode().rstrip("\n")


# ── what paths stand for ────────────────────────────────────────────────────────────────────────────────────


def test_braces_are_expanded() -> None:
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{2..0}") == ["2", "1", "0"]
    assert expand_braces("{a,b}{1..2}") == ["a1", "a2", "b1", "b2"]
    assert expand_braces("a{b}c{0..1}") == ["a{b}c0", "a{b}c1"]
    with pytest.raises(SourceError, match="1000000 are the most"):
        expand_braces("{0..99999999}")


def test_braces_of_remote_files_are_never_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    found = Storage().expand("s3://bucket/train-{000..127}.tar")
    assert len(found) == 128
    assert found[127] == "s3://bucket/train-127.tar"
    assert Storage().expand("https://host/a.tar?signature=*") == ["https://host/a.tar?signature=*"]


def test_local_wildcards_and_folders(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.bin", ".hidden", "sub/d.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert Storage().expand(tmp_path / "*.txt") == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert Storage().expand([str(tmp_path / "c.bin"), tmp_path / "a*"]) == [
        str(tmp_path / "c.bin"),
        str(tmp_path / "a.txt"),
    ]
    found = [os.path.relpath(path, tmp_path) for path in Storage().list(str(tmp_path))]
    assert found == ["a.txt", "b.txt", "c.bin", "sub/d.txt"]
    with pytest.raises(SourceError, match="there is no file"):
        Storage().expand(tmp_path / "*.tar")


def test_two_stars_are_folders_of_any_depth_and_each_file_comes_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", ".git/f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "b" / "circle").symlink_to(tmp_path)

    def expand(pattern: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in Storage().expand(tmp_path / pattern)]

    assert expand("**/*.txt") == ["a.txt", "b/c.txt", "b/d/e.txt"]
    assert expand("**") == ["."]
    assert expand("**/*") == expand("*") == ["a.txt", "b"]
    assert expand(".*/*") == [".git/f.txt"]


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a b.txt"
    path.write_bytes(b"text")
    url = path.as_uri()
    assert not is_remote(url)
    assert Storage().expand(url) == [str(path)]
    assert Storage().local(url) == str(path)
    assert Storage().nbytes(url) == 4
    assert Storage().list(tmp_path.as_uri()) == [str(path)]
    with Storage().open(url, 1) as file:
        assert file.read() == b"ext"


def test_local_files_that_are_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for method in (Storage().open, Storage().local, Storage().nbytes):
        with pytest.raises(SourceError, match="missing"):
            method(missing)


def test_a_pipe_is_refused_as_data_are_read_more_than_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x\n1\n")
    os.close(writing)
    os.mkfifo(tmp_path / "a.csv")
    for path in (f"/dev/fd/{reading}", tmp_path / "a.csv", tmp_path):
        with pytest.raises(SourceError, match="is a pipe, which is read once"):
            penstock.open(path, format="csv")
    os.close(reading)


def test_wildcards_and_folders_in_s3(s3: Proxy) -> None:
    s3.plan = FaultPlan(["503", "", "500", "", "cut"])
    numbered = [f"s3://bucket/train/{shard}.txt" for shard in range(SHARDS)]
    assert QUICK.expand("s3://bucket/train/*.txt") == numbered
    assert QUICK.expand("s3://bucket/train/[12].txt") == numbered[1:3]
    assert QUICK.expand("s3://bucket/train/?.txt") == numbered
    assert QUICK.list("s3://bucket/train/") == [*numbered, "s3://bucket/train/more/what?.txt"]
    assert QUICK.list("s3://bucket/train") == QUICK.list("s3://bucket/train/")
    assert QUICK.expand("s3://bucket/train/*") == [*numbered, "s3://bucket/train/more"]
    with pytest.raises(SourceError, match="there is no file"):
        QUICK.expand("s3://bucket/nothing/*.txt")


def test_wildcards_and_folders_of_a_web_server(http: Files) -> None:
    found = [f"{http.url}/train/{shard}.txt" for shard in range(SHARDS)]
    assert QUICK.expand(f"{http.url}/train/*.txt") == found
    assert QUICK.expand(f"{http.url}/*") == [f"{http.url}/train/"]
    assert QUICK.list(f"{http.url}/train/") == found


def test_wildcards_and_folders_in_memory() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/train/a.txt": b"a", "/train/b.txt": b"b", "/train/.c/d.txt": b"d"})
    assert Storage().expand("memory://train/**/*.txt") == ["memory://train/a.txt", "memory://train/b.txt"]
    assert Storage().expand("memory://train/**") == ["memory://train"]
    assert Storage().expand("memory://train/*.txt") == ["memory://train/a.txt", "memory://train/b.txt"]
    assert Storage().list("memory://train") == ["memory://train/a.txt", "memory://train/b.txt"]
    assert Storage().nbytes("memory://train/a.txt") == 1
    memory.rm("/train", recursive=True)


# ── S3 ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folders() -> Iterator[Files]:
    files = {f"/d/{folder}/{number}.txt": b"x" for folder in "abcd" for number in range(2)}
    with Files(files).running() as server:
        yield server


def in_folders(server: Files) -> list[str]:
    return [f"{server.url}/d/{folder}/{number}.txt" for folder in "abcd" for number in range(2)]


@pytest.mark.parametrize("fault", ["refuse", "reset", "503", "stall"])
def test_a_folder_whose_listing_fails_once_is_listed_again_and_not_left_out(folders: Files, fault: str) -> None:
    for list_all in (QUICK.list, lambda url: QUICK.expand(f"{url}*/*.txt")):
        folders.plan = FaultPlan([fault], only="/b/?$")
        assert list_all(f"{folders.url}/d/") == in_folders(folders)
        assert not folders.plan.first


def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it(folders: Files) -> None:
    folders.plan = FaultPlan(fault_rate=1, kinds=("refuse",), only="/b/?$")
    storage = Storage(retries=1, stall_s=0.5)
    for list_all in (storage.list, lambda url: storage.expand(f"{url}*/*.txt")):
        with pytest.raises(SourceError, match=r"the folder http://.*/d/b cannot be listed: .*that was attempt 2"):
            list_all(f"{folders.url}/d/")


def test_a_folder_that_is_named_and_not_there_is_an_error(folders: Files) -> None:
    honest = folders.answer
    folders.answer = lambda method, path, headers: (
        (404, {}, b"") if path.rstrip("/") == "/d/b" else honest(method, path, headers)
    )
    with pytest.raises(SourceError, match=r"the folder http://.*/d/b cannot be listed: there is none"):
        QUICK.list(f"{folders.url}/d/")


def test_a_server_that_refuses_connections_is_no_empty_folder() -> None:
    with pytest.raises(SourceError, match=r"the folder http://127.0.0.1:1/d/ cannot be listed: .*Cannot connect"):
        penstock.open("http://127.0.0.1:1/d/", format="images", storage=Storage(retries=0))


@pytest.mark.parametrize("fault", ["refuse", "503"])
def test_wildcards_for_folders_of_s3_leave_out_none_whose_listing_fails(s3: Proxy, moto: Address, fault: str) -> None:
    put(moto, {f"deep/{folder}/0.txt": b"x" for folder in "ab"})
    s3.plan = FaultPlan([fault], only="prefix=deep(%2F|/)b")
    assert QUICK.expand("s3://bucket/deep/*/*.txt") == [f"s3://bucket/deep/{folder}/0.txt" for folder in "ab"]
    assert not s3.plan.first


class OldProtocol(fsspec.AbstractFileSystem):
    """Two folders, of which one cannot be listed at first."""

    protocol = "old"
    failures: ClassVar[list[str]] = []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if path in self.failures:
            self.failures.remove(path)
            raise OSError("the disk of the server did not answer")
        is_top = path.endswith("/d")
        names, kind = ([f"{path}/a", f"{path}/b"], "directory") if is_top else ([f"{path}/0.txt"], "file")
        return [{"name": name, "size": 1, "type": kind} for name in names]


def test_a_filesystem_without_coroutines_leaves_out_no_folder_either() -> None:
    fsspec.register_implementation("old", OldProtocol, clobber=True)
    OldProtocol.failures = ["host/d/b"]
    assert QUICK.list("old://host/d/") == ["old://host/d/a/0.txt", "old://host/d/b/0.txt"]
    assert not OldProtocol.failures


def test_a_file_of_s3_is_read_whatever_happens(s3: Proxy) -> None:
    s3.plan = FaultPlan(
        ["500", "503", "cut"], fault_rate=0.3, kinds=("500", "503", "cut", "reset", "slow", "refuse", "short")
    )
    with QUICK.open("s3://bucket/train/3.txt") as file:
        assert file.read() == text(3)
    assert QUICK.nbytes("s3://bucket/train/3.txt") == len(text(3))


def test_attempts_do_not_multiply(s3: Proxy) -> None:
    s3.plan = FaultPlan(fault_rate=1.0, kinds=("500",))
    with pytest.raises(SourceError, match="attempt 4"):
        Storage(retries=3).nbytes("s3://bucket/train/3.txt")
    assert len(s3.requests) == 4
    s3.requests.clear()
    s3.plan = FaultPlan([""], fault_rate=1.0, kinds=("cut",))
    with pytest.raises(SourceError, match="cannot be read"), Storage(retries=0).open("s3://bucket/train/3.txt") as file:
        file.read()
    assert len(s3.requests) == 2


def test_a_file_that_is_not_in_s3_is_missed_at_once(s3: Proxy) -> None:
    with pytest.raises(SourceError, match=r"there is no file s3://bucket/none \(HTTP 404"):
        QUICK.open("s3://bucket/none")
    assert len(s3.requests) == 1


def test_credentials_that_are_wrong_or_missing_say_what_to_do(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.answer = lambda *_: (403, {}, b"<Error><Code>InvalidAccessKeyId</Code></Error>")  # type: ignore[method-assign]
    with pytest.raises(SourceError, match=r"may not be read .*403.*AWS_PROFILE"):
        QUICK.open("s3://bucket/train/0.txt")
    assert len(s3.requests) == 1
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(SourceError, match=r"may not be read .*NoCredentialsError.*AWS_PROFILE"):
        Storage(stall_s=1.0).open("s3://bucket/train/0.txt")
    assert len(s3.requests) == 1


def test_no_secret_of_an_endpoint_is_in_an_error_or_its_traceback(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:s3cr-t@127.0.0.1:1")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})  # or aiohttp finds two ways to say who one is
    with pytest.raises(SourceError, match=r"//127\.0\.0\.1:1") as raised:
        Storage(retries=0, stall_s=1.0).open("s3://bucket/train/0.txt")
    assert "s3cr-t" not in "".join(traceback.format_exception(raised.value))


def test_a_profile_that_is_not_there_is_an_error(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(SourceError, match=r"may not be read .*ProfileNotFound.*AWS_PROFILE"):
        QUICK.open("s3://bucket/train/0.txt")


def test_a_bucket_in_another_region_is_asked_there_after_s3_has_said_so(s3: Proxy) -> None:
    honest, refused = s3.answer, [b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>"]

    def first_refused(method: str, path: str, headers: Any) -> Any:
        return (400, {}, refused.pop()) if refused and method == "GET" else honest(method, path, headers)

    s3.answer = first_refused  # type: ignore[method-assign]
    assert Storage(retries=3).read("s3://bucket/train/0.txt", 1 << 20) == text(0)
    assert [method for method, _, _ in s3.requests] == ["GET", "HEAD", "GET"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"requester_pays": True}, {"x-amz-request-payer": "requester"}),
        (
            {"s3_additional_kwargs": {"SSECustomerKey": "k" * 32, "SSECustomerAlgorithm": "AES256"}},
            {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        ),
    ],
)
def test_what_the_user_configures_for_s3_goes_with_each_range(
    s3: Proxy, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], expected: dict[str, str]
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", config)
    honest, seen = s3.answer, []

    def noting(method: str, path: str, headers: Any) -> Any:
        if method == "GET":
            seen.append({name.lower(): value for name, value in headers.items()})
        return honest(method, path, headers)

    s3.answer = noting  # type: ignore[method-assign]
    assert Storage(retries=3).read("s3://bucket/train/0.txt", 1 << 20) == text(0)
    assert [{name: one[name] for name in expected} for one in seen] == [expected]
    signed = parse_qs(urlsplit(s3.requests[0][1]).query)["X-Amz-SignedHeaders"][0].split(";")
    assert {*signed} <= {*seen[0]}


def test_a_listing_of_several_pages_begins_again_after_a_failure(s3: Proxy) -> None:
    keys = ["t/a.txt", "t/b+c d.txt", "t/é.txt", "t/folder/", "t/z.txt"]
    asked, failures = [], [500, 503]

    def answer(method: str, path: str, headers: Any) -> Any:
        query = parse_qs(urlsplit(path).query)
        start = int(query.get("continuation-token", ["0"])[0])
        if start == 2 and failures:
            return failures.pop(), {}, b"<Error><Code>InternalError</Code></Error>"
        asked.append(start)
        contents = "".join(
            f"<Contents><Key>{quote(key)}</Key><Size>{place}</Size><ETag>&quot;{place}&quot;</ETag></Contents>"
            for place, key in enumerate(keys[start : start + 2], start)
        )
        token = f"<NextContinuationToken>{start + 2}</NextContinuationToken>"
        more = f"<IsTruncated>true</IsTruncated>{token}" if start + 2 < len(keys) else ""
        page = f"<ListBucketResult><EncodingType>url</EncodingType>{more}{contents}</ListBucketResult>"
        return 200, {}, page.encode()

    s3.answer = answer  # type: ignore[method-assign]
    found = QUICK.listed_versions("s3://bucket/t")
    assert {url: (one.nbytes, one.version) for url, one in found.items()} == {
        f"s3://bucket/{key}": (place, f'"{place}"{mark_of_server(s3.url)}')
        for place, key in enumerate(keys)
        if not key.endswith("/")
    }
    assert asked == [0, 0, 0, 2, 4]


class SameVersions(Files):
    """A server whose objects have the sizes and ETags of another's, and a listing that says so."""

    def answer(self, method: str, path: str, headers: Any, body: bytes = b"") -> Any:
        if "list-type" in path:
            contents = "".join(
                f'<Contents><Key>{name.removeprefix("/bucket/")}</Key><Size>{len(data)}</Size><ETag>"e"</ETag></Contents>'
                for name, data in self.files.items()
            )
            return 200, {}, f"<ListBucketResult>{contents}</ListBucketResult>".encode()
        status, told, content = super().answer(method, path, headers, body)
        return status, {**told, "ETag": '"e"'}, content


def test_a_copy_is_of_one_endpoint_whatever_another_has_under_the_same_name(
    moto: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Size and ETag say nothing of whose object it is: anyone may serve a bucket of the same name with them."""
    storage = Storage(cache=str(tmp_path / "cache"))
    for content in (b"ours", b"evil", b"ours"):
        storage = replace(storage)  # of another opening
        with SameVersions({"/bucket/t/a.bin": content, "/bucket/t/b.bin": content}).running() as server:
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
            listed = storage.listed_versions("s3://bucket/t")
            assert storage.read("s3://bucket/t/a.bin", 100, listed["s3://bucket/t/a.bin"]) == content
            assert storage.read("s3://bucket/t/a.bin", 100) == content
            with storage.open("s3://bucket/t/b.bin") as file:
                assert file.read() == content
            assert Path(storage.local("s3://bucket/t/b.bin")).read_bytes() == content
        acquire().shutdown()  # as another program, which has asked no server before


@pytest.mark.parametrize("name", ["plain.txt", "with space+é.txt"])
def test_requests_are_signed_as_s3_checks_them(
    s3: Proxy, moto: Address, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """moto checks no signature: the body is no part of it, nor is a key that is in the URL encoded another time."""
    put(moto, {name: b"data"})
    honest, seen = s3.answer, []

    def noting(method: str, path: str, headers: Any) -> Any:
        seen.append((s3.url + path, dict(headers)))
        return honest(method, path, headers)

    s3.answer = noting  # type: ignore[method-assign]
    assert QUICK.read(f"s3://bucket/{name}", 100) == b"data"
    for url, headers in seen:
        asked = {key: values[0] for key, values in parse_qs(urlsplit(url).query).items()}
        at = datetime.strptime(asked["X-Amz-Date"], "%Y%m%dT%H%M%SZ")
        monkeypatch.setattr("botocore.auth.get_current_datetime", lambda at=at: at)
        request = AWSRequest("GET", url.partition("?")[0], {"Range": headers["Range"]})
        S3SigV4QueryAuth(Credentials("key", "secret"), "s3", "us-east-1", int(asked["X-Amz-Expires"])).add_auth(request)
        assert {key: values[0] for key, values in parse_qs(urlsplit(request.url).query).items()} == asked
    assert len(seen) == 1


@pytest.mark.parametrize("key", ["a b/c+d&e=f#g.txt", "ü/ñ%20x.txt", "d//e.txt", "x~!*'().txt", "empty"])
def test_objects_of_any_name_are_read_from_s3(s3: Proxy, moto: Address, key: str) -> None:
    data = b"" if key == "empty" else key.encode()
    put(moto, {key: data})
    assert QUICK.read(f"s3://bucket/{key}", 100) == data
    with QUICK.open(f"s3://bucket/{key}") as file:
        assert file.read() == data


@pytest.mark.parametrize("url", ["s3://bucket/again/a.txt", "s3://bucket/again/*.txt", "s3://bucket/again/"])
def test_an_object_that_changes_between_two_reads_of_an_open_source_is_an_error(
    s3: Proxy, moto: Address, url: str
) -> None:
    put(moto, {"again/a.txt": b"first"})
    storage = pickle.loads(pickle.dumps(QUICK))
    (path,) = storage.list(url) if url.endswith("/") else storage.expand(url)
    for _ in range(2):
        with storage.open(path) as file:
            assert file.read() == b"first"
    put(moto, {"again/a.txt": b"other"})
    for read in (storage.open, pickle.loads(pickle.dumps(storage)).open):  # a worker's, too
        with pytest.raises(SourceError, match=r"again/a\.txt was changed since it was opened; open it again"):
            read(path)


def test_a_file_of_s3_that_changes_is_an_error(s3: Proxy) -> None:
    with QUICK.open("s3://bucket/train/0.txt") as file:
        file.read(10)
        honest = s3.answer

        def other(method: str, path: str, headers: Any) -> Any:
            status, told, worker_type = honest(method, path, headers)
            return status, {**told, "ETag": '"another"'}, worker_type

        s3.answer = other  # type: ignore[method-assign]
        with pytest.raises(SourceError, match="was changed since it was opened"):
            file.read()


@pytest.mark.parametrize("seed", range(2))
def test_an_s3_server_that_answers_nonsense_gives_no_foreign_error(s3: Proxy, seed: int) -> None:
    chance, honest = random.Random(seed), s3.answer

    def lying(method: str, path: str, headers: Any) -> Any:
        status, told, data = honest(method, path, headers)
        worker_type, told = bytearray(data), dict(told)
        what = chance.choice(["worker_type", "header", "lost", "status", "short", ""])
        if what == "worker_type" and worker_type:
            worker_type[chance.randrange(len(worker_type))] = chance.randrange(256)
        elif what == "header":
            told[chance.choice(list(told))] = str(chance.randrange(10**20))
        elif what == "lost":
            told.pop(chance.choice(list(told)))
        elif what == "status":
            status = chance.choice([100, 200, 204, 206, 301, 304, 400, 405, 409, 418, 599, 999])
        elif what == "short":
            worker_type = worker_type[: chance.randrange(len(worker_type) + 1)]
        return status, told, bytes(worker_type)

    s3.answer = lying  # type: ignore[method-assign]
    storage = Storage(retries=1, stall_s=0.2, timeout_s=2)
    for _ in range(6):
        for ask in (storage.list, storage.expand, storage.nbytes, lambda url: storage.open(url).close()):
            with contextlib.suppress(SourceError):
                ask("s3://bucket/train/*.txt" if ask == storage.expand else "s3://bucket/train/1.txt")


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loader", [penstock.DataLoader, TorchDataLoader])
@pytest.mark.parametrize("caches", [False, True])
def test_every_sample_comes_once_from_s3(s3: Proxy, tmp_path: Path, loader: Any, caches: bool) -> None:
    s3.plan = FaultPlan(
        fault_rate=0.25, seed=7, kinds=("500", "503", "cut", "reset", "slow", "refuse", "short", "stall")
    )
    storage = Storage(
        cache=str(tmp_path / "cache") if caches else None, range_nbytes=4096, stall_s=0.5, retries=10, timeout_s=60
    )
    stream = Lines(storage.expand("s3://bucket/train/{0..4}.txt"), storage)
    for _ in range(2):
        batches = loader(stream, batch_size=32, num_workers=2, collate_fn=list, multiprocessing_context="fork")
        assert Counter(line for batch in batches for line in batch) == everything()
    if caches:
        s3.requests.clear()
        left = sorted(name.rpartition("-")[2] for name in os.listdir(tmp_path / "cache"))
        assert left == [*(f"{shard}.txt" for shard in range(SHARDS)), "lock"]
        assert Counter(stream) == everything()
        assert {method for method, _, _ in s3.requests} == {"HEAD"}


@pytest.mark.parametrize(
    ("name", "suffix", "url"),
    [
        ("jsonl", ".jsonl", "s3://bucket/jsonl/{0..2}.jsonl"),
        ("tar", ".tar", "s3://bucket/tar/*.tar"),
        ("hdf5", ".h5", "s3://bucket/hdf5/"),
    ],
)
def test_penstock_open_reads_every_sample_of_s3_once(
    s3: Proxy, moto: Address, tmp_path: Path, name: str, suffix: str, url: str
) -> None:
    for shard in range(3):
        samples = [{"number": np.int64(shard * 100 + at), "text": f"sample {at}"} for at in range(40)]
        path = write_samples(tmp_path / f"{shard}{suffix}", samples)
        put(moto, {f"{name}/{shard}{suffix}": path.read_bytes()})
    s3.plan = FaultPlan(fault_rate=0.2, seed=3)
    source = penstock.open(url, cache=tmp_path / "cache")
    batches = penstock.DataLoader(source, batch_size=7, num_workers=2)
    assert sorted(int(number) for batch in batches for number in batch["number"]) == [
        shard * 100 + at for shard in range(3) for at in range(40)
    ]
    source.close()
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".part")]


def test_forked_workers_read_zarr_from_s3_and_leave_its_sessions_alone(
    s3: Proxy, moto: Address, tmp_path: Path
) -> None:
    lines, group = tmp_path / "a.jsonl", tmp_path / "a.zarr"
    lines.write_text("".join(f'{{"x": {number}}}\n' for number in range(16)))
    python = [sys.executable]  # processes of their own: the threads of zarr and fsspec never end
    subprocess.run([*python, "-m", "penstock", "convert", lines, group, "--workers", "0", "--quiet"], check=True)
    files = [file for file in group.rglob("*") if file.is_file()]
    put(moto, {f"zarr/{file.relative_to(tmp_path)}": file.read_bytes() for file in files})
    script = """
import gc, penstock
for workers in (0, 2):
    source = penstock.open("s3://bucket/zarr/a.zarr").map(lambda sample: (sample, gc.collect())[0])
    batches = penstock.DataLoader(source, batch_size=8, num_workers=workers)
    print(sorted(int(x) for batch in batches for x in batch["x"]) == list(range(16)))
    source.close()
"""
    done = subprocess.run([*python, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


def test_every_sample_comes_once_from_a_web_server(http: Files) -> None:
    http.plan = FaultPlan(fault_rate=0.25, seed=3)
    stream = Lines(QUICK.expand(f"{http.url}/train/{{0..4}}.txt"), QUICK)
    batches = penstock.DataLoader(stream, batch_size=32, num_workers=2, collate_fn=list)
    assert Counter(line for batch in batches for line in batch) == everything()


def test_workers_that_share_one_shard_read_every_sample_once(http: Files, tmp_path: Path) -> None:
    storage = Storage(cache=str(tmp_path), range_nbytes=4096)
    stream = Lines([f"{http.url}/train/0.txt"], storage)
    batches = penstock.DataLoader(stream, batch_size=32, num_workers=2, collate_fn=list)
    assert Counter(line for batch in batches for line in batch) == Counter(text(0).decode().splitlines())
    assert len(os.listdir(tmp_path)) == 2, "a copy and the lock"


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_local_copy_is_downloaded_once_whatever_happens(http: Files, tmp_path: Path) -> None:
    http.plan = FaultPlan(fault_rate=0.3, seed=2, only="1.txt")
    storage = Storage(cache=str(tmp_path), range_nbytes=4096, stall_s=0.5, retries=10)
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(storage.local(f"{http.url}/train/1.txt"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert Path(paths[0]).read_bytes() == text(1)
    assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(paths[0]), "lock", "leases"])
    http.plan = FaultPlan()
    http.requests.clear()
    assert storage.local(f"{http.url}/train/1.txt") == paths[0]
    assert [wanted for _, _, wanted in http.requests] == ["bytes=0-0"]


def test_a_new_version_is_another_copy(http: Files, tmp_path: Path) -> None:
    storage = Storage(cache=str(tmp_path))
    old = storage.local(f"{http.url}/train/1.txt")
    http.files["/train/1.txt"] = text(2)
    new = replace(storage).local(f"{http.url}/train/1.txt")  # of another opening
    assert Path(old).read_bytes() == text(1)
    assert Path(new).read_bytes() == text(2)


def test_a_copy_without_a_version_is_not_reused_by_another_opening(http: Files, tmp_path: Path) -> None:
    http.has_etags, http.files = False, {"/a.jsonl": b'{"x": 1}\n'}
    storage = Storage(cache=str(tmp_path / "cache"))
    for number in (1, 2):
        http.files["/a.jsonl"] = b'{"x": %d}\n' % number
        assert [int(one["x"]) for one in penstock.open(f"{http.url}/a.jsonl", storage=storage)] == [number]


def test_without_a_cache_a_local_copy_lies_in_the_users_folder(
    http: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Storage().local(f"{http.url}/train/1.txt")
    assert path.startswith(str(tmp_path / "penstock" / "remote"))
    assert Path(path).read_bytes() == text(1)


def test_a_stream_that_does_not_fit_the_cache_is_read_past_it(http: Files, tmp_path: Path) -> None:
    storage = Storage(cache=str(tmp_path), cache_nbytes=100)
    url = f"{http.url}/train/0.txt"
    with pytest.warns(RuntimeWarning, match="not kept: .* raise cache_nbytes"), storage.open(url) as file:
        assert file.read() == text(0)
    with pytest.raises(SourceError, match="raise cache_nbytes"):
        storage.local(url)


def test_who_stops_early_leaves_no_copy_and_no_part(http: Files, tmp_path: Path) -> None:
    storage = Storage(cache=str(tmp_path), range_nbytes=1024)
    with storage.open(f"{http.url}/train/0.txt") as file:
        assert file.readline() == b"shard 0, line 0\n"
    with storage.open(f"{http.url}/train/0.txt", 100) as file:
        assert file.read() == text(0)[100:]
    assert os.listdir(tmp_path) == ["lock"]
