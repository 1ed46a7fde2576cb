"""gs://, az:// and hf://, on local servers that speak their protocols: what is read, cached, written and refused."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_stores import Azure, Google, Hub, Store
from sample_files import samples_in

import penstock
from penstock.core.errors import ExtraError, OptionError, SourceError
from penstock.data.convert import convert
from penstock.data.storage.event_loop import acquire
from penstock.data.storage.storage import Storage

ROOTS = {"gcsfs": "gs://bucket", "adlfs": "az://bucket", "huggingface_hub": "hf://datasets/some/bucket"}
STORES: dict[str, type[Store]] = {"gcsfs": Google, "adlfs": Azure, "huggingface_hub": Hub}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("penstock.data.storage.event_loop.LINGER_S", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(params=[*STORES])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    # When gcsfs is imported: with it, it asks Google by gRPC for each bucket, wherever the endpoint is.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture
def store(package: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with _serving(package, monkeypatch) as store:
        yield store


@contextmanager
def _serving(package: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    import fsspec

    with STORES[package]().running() as store:
        assert isinstance(store, Store)
        if package == "gcsfs":
            monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": store.url, "token": "anon"})
        elif package == "adlfs":
            endpoint = f"AccountName=account;AccountKey=a2V5;BlobEndpoint={store.url}/account"
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{endpoint}")
        else:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", store.url)
        yield store
        if package == "huggingface_hub":
            import huggingface_hub

            huggingface_hub.close_session()  # its connections live as long as the program


@pytest.fixture
def root(package: str, store: Store) -> str:
    return ROOTS[package]


def tar(members: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def parquet(table: dict[str, Any]) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = io.BytesIO()
    pq.write_table(pa.table(table), data, row_group_size=10)
    return data.getvalue()


def test_folders_patterns_and_files_of_each_kind_are_read(store: Store, root: str) -> None:
    store.objects = {f"images/{'ab'[number % 2]}/{number}.jpg": b"%d" % number for number in range(8)}
    store.objects |= {f"lines/{number}.jsonl": b'{"x": %d}\n' % number * 3 for number in range(2)}
    store.objects |= {"t/0.tar": tar({f"{number}.txt": b"%d" % number for number in range(5)})}
    store.objects |= {"p/0.parquet": parquet({"x": np.arange(25)}), "lines/empty.jsonl": b""}
    images = penstock.open(f"{root}/images/", fields=["encoded", "label"])
    batches = [*penstock.DataLoader(images, batch_size=3, num_workers=0, collate_fn=list)]
    found = [(one["encoded"], one["label"]) for batch in batches for one in batch]
    assert found == [(b"%d" % number, number % 2) for number in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert [int(one["x"]) for one in penstock.open(f"{root}/lines/")] == [0, 0, 0, 1, 1, 1]
    assert [int(one["x"]) for one in penstock.open(f"{root}/lines/*.jsonl")] == [0, 0, 0, 1, 1, 1]
    assert len([*penstock.open(f"{root}/t/{{0..0}}.tar")]) == 5
    assert [int(one["x"]) for one in penstock.open(f"{root}/p/0.parquet")] == [*range(25)]


def test_small_files_take_one_request_each_and_large_ones_ranges_of_one_version(store: Store, root: str) -> None:
    store.objects = {"f/first": b"", "f/small": b"small", "f/large": bytes(range(256)) * 40, "f/empty": b""}
    storage = Storage(range_nbytes=1000)
    with storage.open(f"{root}/f/large", 300) as file:
        storage.read(f"{root}/f/first", 100)  # the connection is kept, and what is asked once of a repository
        store.requests.clear()
        assert storage.read(f"{root}/f/small", 100) == b"small"
        assert sum("small" in path for _, path, _ in store.requests) == 1
        assert file.read(20) == store.objects["f/large"][300:320]
    assert storage.read(f"{root}/f/large", 1 << 20) == store.objects["f/large"]
    assert storage.read(f"{root}/f/empty", 100) == b""


def test_a_copy_is_kept_until_the_object_is_another(store: Store, root: str, tmp_path: Path) -> None:
    def read() -> list[int]:
        return [int(one["x"]) for one in penstock.open(f"{root}/c/0.jsonl", cache=tmp_path / "cache")]

    store.objects = {"c/0.jsonl": b'{"x": 1}\n'}
    assert read() == [1]
    copies = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*0.jsonl")}
    assert len(copies) == 1
    assert read() == [1]
    assert {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*0.jsonl")} == copies
    store.objects["c/0.jsonl"] = b'{"x": 2}\n'  # of the same size
    assert read() == [2]


def test_the_version_of_an_object_says_whose_it_is(
    store: Store, root: str, package: str, request: pytest.FixtureRequest
) -> None:
    store.objects["a.txt"] = b"ours"
    (ours,) = Storage().file_versions([f"{root}/a.txt"])
    acquire().shutdown()  # as another program, which has asked no server before
    with _serving(package, request.getfixturevalue("monkeypatch")) as other:
        other.objects["a.txt"] = b"ours"
        (theirs,) = Storage().file_versions([f"{root}/a.txt"])
    assert ours.nbytes == theirs.nbytes
    assert ours.version != theirs.version
    assert ours.version.partition(" @")[0] == theirs.version.partition(" @")[0]


def test_an_object_that_changes_while_it_is_read_is_an_error(store: Store, root: str) -> None:
    store.objects = {"f/0": bytes(4000)}
    with Storage(range_nbytes=1000, ahead=0).open(f"{root}/f/0") as file:
        file.read(10)
        store.objects["f/0"] = bytes([1]) * 4000
        with pytest.raises(SourceError, match="was changed since it was opened"):
            file.read(4000)


def test_what_is_missing_is_named(store: Store, root: str) -> None:
    store.objects = {"a/0.jsonl": b"{}"}
    for url in (f"{root}/a/1.jsonl", f"{root}/b/1.jsonl"):
        with pytest.raises(SourceError, match=f"there is no file {url}"):
            penstock.open(url)
    with pytest.raises(SourceError, match=f"{root}/nothing/"):
        penstock.open(f"{root}/nothing/")
    with pytest.raises(SourceError, match="nobucket"):
        Storage().read(f"{root}/a/0.jsonl".replace("bucket", "nobucket"), 10)


def test_what_may_not_be_read_names_where_credentials_are_looked_for(store: Store, root: str, package: str) -> None:
    store.objects = {"a/0.jsonl": b"{}"}
    store.needs_token = "no token holds this"
    which = {"gcsfs": "GOOGLE_APPLICATION_CREDENTIALS", "adlfs": "AZURE_STORAGE_CONNECTION_STRING"}
    with pytest.raises(SourceError, match=rf"may not be read .*401.*{which.get(package, 'HF_TOKEN')}"):
        Storage().read(f"{root}/a/0.jsonl", 10)
    assert len(store.requests) < 5  # it is no matter of trying again


def test_an_account_that_is_not_said_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    with pytest.raises(SourceError, match=r"az://bucket/a may not be read .*AZURE_STORAGE_CONNECTION_STRING"):
        Storage().read("az://bucket/a", 10)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("gs://bucket/a", "gcsfs", "gs"),
        ("az://bucket/a", "adlfs", "az"),
        ("abfss://bucket/a", "adlfs", "az"),
        ("hf://datasets/some/bucket/a", "huggingface_hub", "hf"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    monkeypatch, url: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExtraError, match=rf"{module} is needed .*penstock\[{extra}\]"):
        Storage().read(url, 10)


def test_a_conversion_writes_there_what_it_writes_here(store: Store, root: str, package: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"x": {number}}}\n' for number in range(30)))
    if package == "huggingface_hub":
        with pytest.raises(OptionError, match=r"results are written to .* choose a local path, and upload"):
            convert(tmp_path / "in.jsonl", f"{root}/out/o.tar", workers=0)
        return
    done = convert(tmp_path / "in.jsonl", f"{root}/out/o.tar", workers=0, shards=2, verify=True)
    here = convert(tmp_path / "in.jsonl", tmp_path / "o.tar", workers=0, shards=2)
    assert (done.checksum, done.samples) == (here.checksum, 30)
    assert store.objects == {f"out/{Path(path).name}": Path(path).read_bytes() for path in here.files}
    assert len(samples_in(f"{root}/out/o-*.tar")) == 30
    with pytest.raises(SourceError, match="exists; --overwrite"):
        convert(tmp_path / "in.jsonl", f"{root}/out/o.tar", workers=0, shards=2)
    convert(tmp_path / "in.jsonl", f"{root}/out/o.tar", workers=0, shards=1, overwrite=True)
    assert [*store.objects] == ["out/o-000000.tar"]
