"""Conversion and inspection on an S3 server that fails: each sample arrives once and equal, or an error is raised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bucket import Address, get, put, serving
from faulty_storage import FaultPlan, Proxy
from sample_files import assert_all_same, samples_in, write_samples

from penstock.core.errors import OptionError, SourceError
from penstock.data.convert import Progress, convert, remote_target
from penstock.data.convert.target import Target
from penstock.data.inspect import inspect, inspector
from penstock.data.inspect.inspection import render
from penstock.data.schema import Sample
from penstock.data.storage.backend import Backend

pytestmark = pytest.mark.usefixtures("preloaded_python")

SHARDS, EACH = 3, 40
SUFFIXES = {"hdf5": ".h5"}


@pytest.fixture(autouse=True)
def _hang_up_quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("penstock.data.storage.event_loop.LINGER_S", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def moto() -> Iterator[Address]:
    with serving() as address:
        yield address


@pytest.fixture
def s3(moto: Address, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(*moto).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def made(number: int) -> list[Sample]:
    """Return a shard's samples."""
    rng = np.random.default_rng(number)
    return [
        {"x": rng.standard_normal((3, at % 5)).astype(np.float32), "y": np.int64(at), "t": f"é {at}"}
        for at in range(number * EACH, (number + 1) * EACH)
    ]


def everything() -> list[Sample]:
    return [sample for number in range(SHARDS) for sample in made(number)]


def shard(path: Path, number: int) -> bytes:
    """Return a shard's bytes; nothing is left at `path`."""
    data = write_samples(path, made(number)).read_bytes()
    path.unlink()
    return data


@pytest.fixture(params=["tfrecord", "tar", "jsonl", "hdf5", "parquet"])
def url(request: pytest.FixtureRequest, moto: Address, tmp_path: Path) -> str:
    """Shards of a format in the bucket."""
    kind = request.param
    suffix = SUFFIXES.get(kind, f".{kind}")
    for number in range(SHARDS):
        data = shard(tmp_path / f"made{suffix}", number)
        put(moto, {f"{kind}/train-{number:03d}{suffix}": data})
    return f"s3://bucket/{kind}/train-{{000..{SHARDS - 1:03d}}}{suffix}"


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_in_s3_become_a_local_file_whatever_happens(s3: Proxy, url: str, tmp_path: Path, workers: int) -> None:
    s3.plan = FaultPlan(
        ["500", "cut", "slow"], fault_rate=0.25, seed=workers, kinds=("500", "503", "cut", "reset", "slow", "refuse")
    )
    done = convert(url, tmp_path / "out.lmdb", workers=workers, verify=True)
    assert (done.samples, done.verified) == (SHARDS * EACH, True)
    assert_all_same(samples_in(tmp_path / "out.lmdb"), everything())
    assert sorted(set(os.listdir(tmp_path)) - {"home"}) == ["out.lmdb"]


def test_a_conversion_resumes_where_the_server_failed(
    s3: Proxy, moto: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.data.storage.retries._MAX_WAIT_S", 0.001)
    for number in range(SHARDS):
        put(moto, {f"go/{number}.jsonl": shard(tmp_path / "made.jsonl", number)})

    def fail_while_writing(progress: Progress) -> None:
        if progress.stage == "writing":
            s3.plan = FaultPlan(fault_rate=1.0, kinds=("503",), only="go/2.jsonl")

    with pytest.raises(
        SourceError, match=r"s3://bucket/go/2.jsonl cannot be read: .*503; that was attempt 9"
    ) as caught:
        convert("s3://bucket/go/", tmp_path / "out.lmdb", workers=0, shards=SHARDS, progress=fail_while_writing)
    assert "samples are kept in" in caught.value.__notes__[0]
    s3.plan = FaultPlan()
    done = convert("s3://bucket/go/", tmp_path / "out.lmdb", workers=0, shards=SHARDS)
    assert done.samples == SHARDS * EACH
    assert EACH <= done.resumed < SHARDS * EACH
    assert_all_same(samples_in(done.files), everything())


def test_a_conversion_of_a_changed_s3_object_is_not_resumed(
    s3: Proxy, moto: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(moto, {"new/0.jsonl": b'{"x": 1}\n' * 300})
    with monkeypatch.context() as patch:
        patch.setattr(Target, "publish", _killed)
        with pytest.raises(RuntimeError, match="killed"):
            convert("s3://bucket/new/0.jsonl", tmp_path / "out.lmdb", workers=0)
    put(moto, {"new/0.jsonl": b'{"x": 2}\n' * 300})
    with pytest.raises(SourceError, match="another source_files"):
        convert("s3://bucket/new/0.jsonl", tmp_path / "out.lmdb", workers=0)


def _killed(*_: object, **__: object) -> None:
    raise RuntimeError("killed")


def test_a_shard_missing_in_s3_is_reported_at_once(s3: Proxy, moto: Address, tmp_path: Path) -> None:
    put(moto, {"holes/0.jsonl": b'{"x": 1}\n'})
    for way in (lambda url: convert(url, tmp_path / "out.lmdb", workers=0), inspect):
        with pytest.raises(SourceError, match=r"there is no file s3://bucket/holes/1\.jsonl"):
            way("s3://bucket/holes/{0..1}.jsonl")
    with pytest.raises(SourceError, match=r"s3://bucket/nothing/"):
        convert("s3://bucket/nothing/", tmp_path / "out.lmdb", workers=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("dst", "reason"),
    [
        ("http://host/out.tar", r"http://.* choose a local path, and upload the result"),
        ("s3://bucket/out.zarr", "zarr is written as a folder of files"),
        ("s3://bucket/out/", "no suffix of a known format"),
    ],
)
def test_a_remote_target_that_could_be_seen_half_is_refused_before_anything_is_read(s3, dst: str, reason: str) -> None:
    with pytest.raises((OptionError, SourceError), match=reason):
        convert("s3://bucket/nothing.jsonl", dst)
    assert s3.requests == []


@pytest.fixture
def shards_here(tmp_path: Path) -> list[str]:
    return [str(write_samples(tmp_path / f"{number}.jsonl", made(number))) for number in range(SHARDS)]


def keys(moto: Address, prefix: str) -> dict[str, bytes]:
    """Return the objects whose keys begin so, after the prefix."""
    found = get(moto, prefix)
    return {key.removeprefix(prefix): data for key, data in found.items()}


@pytest.mark.parametrize("suffix", ["tar.gz", "lmdb", "parquet"])
def test_what_is_written_to_s3_is_byte_for_byte_what_is_written_here(
    s3: Proxy, moto: Address, shards_here: list[str], tmp_path: Path, suffix: str
) -> None:
    s3.plan = FaultPlan(["500", "reset"], fault_rate=0.2, seed=1, kinds=("500", "503", "cut", "reset", "refuse"))
    done = convert(shards_here, f"s3://bucket/as-{suffix}/out.{suffix}", workers=0, shards=2, verify=True)
    here = convert(shards_here, tmp_path / f"out.{suffix}", workers=0, shards=2)
    assert done.files == tuple(f"s3://bucket/as-{suffix}/out-{number:06d}.{suffix}" for number in range(2))
    assert (done.checksum, done.nbytes, done.verified) == (here.checksum, here.nbytes, True)
    assert keys(moto, f"as-{suffix}/") == {path.name: path.read_bytes() for path in tmp_path.glob("out-*")}
    assert_all_same(samples_in(f"s3://bucket/as-{suffix}/out-*.{suffix}"), everything())
    assert [*(tmp_path / "home" / "penstock" / "convert").iterdir()] == []


def test_an_upload_that_was_killed_is_resumed_with_the_objects_that_are_missing(
    s3: Proxy, moto: Address, shards_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded: list[str] = []

    def killed_after_two(path: str, url: str, **options: bool) -> None:
        if len(uploaded) == 2:
            raise RuntimeError("killed")
        upload(path, url, **options)
        uploaded.append(url)
        if len(uploaded) == 2:  # after its object has come, before its file is removed
            raise RuntimeError("killed")

    upload = remote_target._upload
    with monkeypatch.context() as patch:
        patch.setattr(remote_target, "_UPLOADS", 1)
        patch.setattr(remote_target, "_upload", killed_after_two)
        with pytest.raises(RuntimeError, match="killed"):
            convert(shards_here, "s3://bucket/resumed/{a,b,c}.tar", workers=0)
    assert sorted(keys(moto, "resumed/")) == ["a.tar", "b.tar"]
    s3.requests.clear()
    done = convert(shards_here, "s3://bucket/resumed/{a,b,c}.tar", workers=0)
    written = [path.partition("?")[0] for method, path, _ in s3.requests if method == "PUT"]
    assert sorted(written) == ["/bucket/resumed/b.tar", "/bucket/resumed/c.tar"]  # b was refused: it is there
    assert done.samples == SHARDS * EACH
    assert_all_same(samples_in("s3://bucket/resumed/{a,b,c}.tar"), everything())


def test_nothing_in_s3_is_replaced_unless_it_is_asked_for(s3: Proxy, moto: Address, shards_here: list[str]) -> None:
    put(moto, {"kept/out-000000.tar": b"old", "kept/out-000007.tar": b"old", "kept/out-7.tar": b"other"})
    with pytest.raises(SourceError, match=r"out-000000\.tar exists; --overwrite"):
        convert(shards_here, "s3://bucket/kept/out.tar", workers=0, shards=2)

    def write_meanwhile(progress: Progress) -> None:
        if progress.stage == "uploading":
            put(moto, {"raced/out.tar": b"another's"})

    with pytest.raises(SourceError, match=r"out\.tar exists; move it away, and repeat the command to resume"):
        convert(shards_here, "s3://bucket/raced/out.tar", workers=0, progress=write_meanwhile)
    assert keys(moto, "raced/") == {"out.tar": b"another's"}
    convert(shards_here, "s3://bucket/kept/out.tar", workers=0, shards=2, overwrite=True)
    assert sorted(keys(moto, "kept/")) == ["out-000000.tar", "out-000001.tar", "out-7.tar"]
    assert_all_same(samples_in("s3://bucket/kept/out-00*.tar"), everything())


def test_a_damaged_upload_is_found_when_it_is_verified(
    s3: Proxy, moto: Address, shards_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_damaged(_: Backend, path: str, url: str, *, overwrite: bool) -> bool:
        data = bytearray(Path(path).read_bytes())
        data[len(data) // 2] ^= 1
        put(moto, {url.removeprefix("s3://bucket/"): bytes(data)})
        return True

    monkeypatch.setattr(Backend, "put", put_damaged)
    with pytest.raises(SourceError, match=r"damaged/out\.tar has other bytes than were uploaded"):
        convert(shards_here, "s3://bucket/damaged/out.tar", workers=0, verify=True)


def test_a_source_in_s3_is_not_written_to(s3: Proxy, moto: Address) -> None:
    put(moto, {"same/0.jsonl": b'{"x": 1}\n'})
    for target in ("s3://bucket/same/0.jsonl", "s3://bucket/same/out.tar"):
        with pytest.raises(SourceError, match="is in the source s3://bucket/same/"):
            convert("s3://bucket/same/" if target.endswith("tar") else target, target, workers=0, overwrite=True)


def test_a_target_may_be_a_file_url(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    done = convert(f"file://{tmp_path}/in.jsonl", f"file://{tmp_path}/out.csv", workers=0)
    assert done.files == (f"{tmp_path}/out.csv",)


def test_s3_is_inspected_whatever_happens(s3: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "_MAX_SECONDS", 60)  # else it reads fewer samples after long waits
    s3.plan = FaultPlan(["500", "cut"], fault_rate=0.25, seed=3, kinds=("500", "503", "cut", "reset", "slow", "refuse"))
    found = inspect(url)
    assert found.files == SHARDS
    assert found.nbytes > SHARDS * 1000
    assert found.samples_read == SHARDS * EACH
    assert found.samples in (None, SHARDS * EACH)
    assert (found.fields["y"].min, found.fields["y"].max) == (0, SHARDS * EACH - 1)
    assert found.errors == []
    assert url in render(found)
