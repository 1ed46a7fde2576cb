"""Small remote files: one request each, those of a batch side by side, and the samples that one by one gives."""

from __future__ import annotations

import gc
import os
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest
import torch
from bucket import put, serving
from faulty_storage import FaultPlan, Files, Proxy
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset

import penstock
from penstock.core.errors import RecordError, SourceError
from penstock.data.source import Source
from penstock.data.storage import event_loop, object_batch
from penstock.data.storage.object_batch import BatchChain, ObjectBatch
from penstock.data.storage.storage import Storage

COUNT = 20
OBJECTS = {f"/{number:03d}.jpg": random.Random(number).randbytes(100 + 37 * number) for number in range(COUNT)}
DATA = list(OBJECTS.values())
PATIENT = Storage(retries=20, timeout_s=600, stall_s=60)


@contextmanager
def connections_ended() -> Iterator[None]:
    """Afterwards close this process's connections, and wait for the threads of servers that have served them.

    The servers have to be closed before: they may still begin to serve a connection that was given up.
    """
    before = set(threading.enumerate())
    yield
    gc.collect()  # an error's traceback keeps an iterator, whose worker has inherited this process's connections
    if event_loop._current is not None:
        event_loop._current.shutdown(600.0)
    for thread in set(threading.enumerate()) - before:
        if "process_request_thread" in thread.name:
            thread.join(600.0)


@pytest.fixture
def files() -> Iterator[Files]:
    with connections_ended(), Files(dict(OBJECTS)).running() as server:
        yield server


def opened(server: Files, storage: Storage = PATIENT, **options: Any) -> Any:
    """Open the objects by their names, and forget the requests by which they are looked up."""
    urls = [server.url + name for name in OBJECTS]
    source = penstock.open(urls, format="images", fields=["encoded"], storage=storage, **options)
    server.requests.clear()
    return source


def encoded(sample: dict[str, Any]) -> bytes:
    data: bytes = sample["encoded"]
    return data


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def batch_of(source: Source, indices: list[int]) -> list[Any]:
    assert source.__getitems__ is not None
    return source.__getitems__(indices)


def test_each_object_is_one_request_once_it_is_open(files: Files) -> None:
    source = opened(files).map(encoded)
    assert [source[index] for index in range(COUNT)] == DATA
    assert len(files.requests) == COUNT
    assert batch_of(source, list(range(COUNT))) == DATA
    assert sorted(path for _, path, _ in files.requests) == sorted([*OBJECTS, *OBJECTS])


def test_of_a_cached_source_only_what_is_not_kept_is_requested_and_that_side_by_side(files: Files) -> None:
    source = opened(files).map(encoded).cached("ram", limit="1MiB")
    assert batch_of(source, list(range(5))) == DATA[:5]
    files.range_barrier = threading.Barrier(3)
    assert batch_of(source, list(range(8))) == DATA[:8]
    assert sorted(path for _, path, _ in files.requests) == list(OBJECTS)[:8]


def test_objects_of_a_batch_are_requested_side_by_side(files: Files) -> None:
    files.range_barrier = threading.Barrier(4)
    assert batch_of(opened(files).map(encoded), list(range(16))) == DATA[:16]


@pytest.mark.parametrize("seed", range(3))
def test_every_sample_is_its_own_whatever_the_network_does(files: Files, seed: int) -> None:
    files.plan = FaultPlan(fault_rate=0.3, seed=seed, kinds=("500", "503", "cut", "reset", "short", "refuse"))
    order = random.Random(seed).choices(range(-COUNT, COUNT), k=40)  # some come several times
    assert batch_of(opened(files).map(encoded), order) == [DATA[index] for index in order]


def test_only_a_few_objects_are_under_way_or_unread(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_batch, "AHEAD", 4)
    requests = opened(files).object_requests(range(COUNT))
    with ObjectBatch(requests) as batch:
        for number, request in enumerate(requests):
            assert len(batch._started) == min(4, COUNT - number)
            found = batch.take(request)
            assert found is not None
            assert found.data == DATA[number]


def test_files_of_a_batch_that_is_started_before_it_is_entered_come_after_those_of_the_batch_before(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_batch, "AHEAD", 6)
    requests, chain = opened(files).object_requests(range(COUNT)), BatchChain()
    first, second = ObjectBatch(requests[:8]), ObjectBatch(requests[8:])
    first.start(chain)
    second.start(chain)
    assert (len(first._started), len(second._started)) == (6, 0)
    with first:
        for number, request in enumerate(requests[:8]):
            found = first.take(request)
            assert found is not None
            assert found.data == DATA[number]
            assert len(first._started) + len(second._started) == 6
    assert len(second._started) == 6
    with second:
        assert [second.take(request).data for request in requests[8:]] == DATA[8:]  # type: ignore[union-attr]
    assert not chain.batches
    assert len(files.requests) == COUNT


def test_a_batch_that_is_closed_before_it_is_entered_makes_room_for_others(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_batch, "AHEAD", 4)
    source, chain = opened(files), BatchChain()
    requests = source.object_requests(range(COUNT))
    first, second = ObjectBatch(requests[:8]), ObjectBatch(requests[8:])
    first.start(chain)
    second.start(chain)
    first.close()
    first.close()
    with second:
        assert [second.take(request).data for request in requests[8:]] == DATA[8:]  # type: ignore[union-attr]
    assert event_loop._current is not None
    assert event_loop._current.users == 1, "the source's own connection"


def test_fewer_files_are_under_way_where_they_are_large(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_batch, "AHEAD_NBYTES", 5 * len(DATA[-1]))
    requests, chain = opened(files).object_requests(range(COUNT)), BatchChain()
    with ObjectBatch(requests[-1:]) as batch:
        batch.take(requests[-1])
    with ObjectBatch(requests) as batch:
        assert len(batch._started) == COUNT, "nobody knows how large they are"
    chain.largest_nbytes = len(DATA[-1])
    batch = ObjectBatch(requests)
    batch.start(chain)
    assert len(batch._started) == 5
    batch.close()


@pytest.mark.parametrize("collate", [as_list, None])
def test_a_worker_requests_the_files_of_its_next_batch_while_it_makes_one(files: Files, collate: Any) -> None:
    files.range_barrier = threading.Barrier(10)  # nobody is answered before two batches are requested
    loader = penstock.DataLoader(opened(files).map(len_of), 5, num_workers=1, collate_fn=collate)
    found = [int(sample) for batch in loader for sample in batch]
    assert found == [len(data) for data in DATA]
    assert len(files.requests) == COUNT
    assert loader.statistics().dispatch == "round_robin"


def len_of(sample: dict[str, Any]) -> int:
    return len(sample["encoded"])


@pytest.mark.parametrize("workers", [1, 2])
def test_passes_that_are_left_early_change_nothing_in_those_after_them(files: Files, workers: int) -> None:
    source = opened(files).map(encoded)
    loader: Any = penstock.DataLoader(source, 2, collate_fn=as_list, num_workers=workers, persistent_workers=True)
    for left_after in (1, 3, 0):
        batches = [batch for batch, _ in zip(loader, range(left_after), strict=False)]
        assert [sample for batch in batches for sample in batch] == DATA[: 2 * len(batches)]
    assert [sample for batch in loader for sample in batch] == DATA


def test_what_cannot_be_fetched_ahead_is_an_error_of_its_own_batch(files: Files) -> None:
    source = opened(files).map(encoded)
    del files.files["/011.jpg"]
    loader: Any = penstock.DataLoader(source, 5, collate_fn=as_list, num_workers=1)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [DATA[:5], DATA[5:10]]
    with pytest.raises(SourceError, match=r"there is no file http://.*/011\.jpg"):
        next(batches)
    assert next(batches) == DATA[15:]


def test_a_state_taken_while_batches_are_requested_ahead_resumes_after_the_last_one_seen(files: Files) -> None:
    source = opened(files).map(encoded)

    def loader() -> Any:
        return penstock.DataLoader(source, 3, collate_fn=as_list, num_workers=1, shuffle=True, seed=5)

    whole, first = [*loader()], loader()
    batches = iter(first)
    seen = [next(batches), next(batches)]
    state = first.state_dict()
    del batches
    second = loader()
    second.load_state_dict(state)
    assert [*seen, *second] == whole


class Draws:
    """A transform with randomness."""

    def __call__(self, sample: Any) -> Any:
        return sample, float(torch.rand(())), random.random()


def test_transforms_draw_the_random_numbers_that_they_draw_one_by_one(files: Files) -> None:
    source = opened(files).map(encoded).map(Draws()).select(range(COUNT - 1, -1, -1)).map(Draws())
    seen = []
    for read in (lambda: [source[index] for index in range(COUNT)], lambda: batch_of(source, list(range(COUNT)))):
        torch.manual_seed(1)
        random.seed(1)
        seen.append(read())
    assert seen[0] == seen[1]


def test_an_error_names_its_object_and_its_index_and_comes_after_the_samples_before_it(files: Files) -> None:
    made = []
    source = opened(files).map(lambda sample: made.append(sample["encoded"]))
    del files.files["/005.jpg"]
    with pytest.raises(SourceError, match=r"there is no file http://.*/005\.jpg") as raised:
        batch_of(source, list(range(10)))
    assert "raised for sample 5 of http" in raised.value.__notes__[0]
    assert made == DATA[:5]
    with pytest.raises(IndexError, match="sample 99"):
        batch_of(source, [0, 99])


@pytest.mark.parametrize("workers", [0, 1])
def test_only_the_sample_that_fails_is_skipped(files: Files, workers: int) -> None:
    source = opened(files).map(encoded)
    del files.files["/005.jpg"]
    loader = penstock.DataLoader(source, COUNT, collate_fn=as_list, num_workers=workers, errors="skip")
    assert list(loader) == [DATA[:5] + DATA[6:]]
    assert loader.statistics().skipped_indices == (5,)
    assert len(files.requests) == COUNT, "also the others of its batch are requested once"


@pytest.mark.parametrize("kind", [TorchDataLoader, penstock.DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_request_each_object_once(files: Files, kind: Any, workers: int) -> None:
    source = opened(files).map(encoded)
    for dataset in (source, Subset(source, range(COUNT))):
        files.requests.clear()
        loader = kind(dataset, 6, collate_fn=as_list, num_workers=workers)
        assert [sample for batch in loader for sample in batch] == DATA
        assert len(files.requests) == COUNT


def test_the_workers_of_both_loaders_read_batches_side_by_side(files: Files) -> None:
    for kind in (TorchDataLoader, penstock.DataLoader):
        files.range_barrier = threading.Barrier(5)
        loader: Any = kind(opened(files).map(encoded), 10, collate_fn=as_list, num_workers=1)
        assert [sample for batch in loader for sample in batch] == DATA


def test_seeded_samples_are_those_of_local_files(files: Files, tmp_path: Path) -> None:
    for name, data in OBJECTS.items():
        (tmp_path / name[1:]).write_bytes(data)
    local = penstock.open(tmp_path, format="images", fields=["encoded"])
    assert isinstance(local, Source)
    assert not local.__getitems__, "local files are read one by one, as without it"
    found = [
        list(penstock.DataLoader(source.map(Draws()), 8, collate_fn=as_list, seed=3, shuffle=True))
        for source in (local, opened(files))
    ]
    assert found[0] == found[1]


def test_a_mixture_reads_its_remote_sources_side_by_side(files: Files) -> None:
    mixture = penstock.mix([(opened(files).map(encoded), 1), ([b"a", b"b", b"c"], 1)], stop="all_exhausted")
    wanted = [mixture[index] for index in range(len(mixture))]
    files.requests.clear()
    files.range_barrier = threading.Barrier(4)
    remote = [index for index in range(len(mixture)) if mixture.locate(index)[0] == 0][:4]
    indices = list(range(remote[-1] + 1))
    assert batch_of(mixture, indices) == wanted[: len(indices)]
    assert len(files.requests) == 4


def test_a_child_that_is_forked_within_a_batch_reads_by_itself(files: Files) -> None:
    source = opened(files).map(encoded)
    with source.fetching(range(COUNT)):
        assert source[0] == DATA[0]
        pid = os.fork()
        if not pid:
            os._exit(int([source[index] for index in range(COUNT)] != DATA))
        assert os.waitpid(pid, 0)[1] == 0
        assert source[1] == DATA[1]


def test_a_closed_source_keeps_no_thread(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "LINGER_S", 0.0)
    source = opened(files).map(encoded)
    batch_of(source, [1, 2])
    threads = [thread for thread in threading.enumerate() if thread.name == "penstock remote"]
    assert len(threads) == 1
    source.close()
    threads[0].join()
    assert batch_of(source, [1, 2]) == DATA[1:3], "and is opened again"


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_large_object_is_read_whole_in_ranges_of_one_version(has_ranges: bool) -> None:
    with connections_ended(), Files(dict(OBJECTS), has_ranges=has_ranges).running() as server:
        source = opened(server, Storage(range_nbytes=100)).map(encoded)
        assert batch_of(source, list(range(COUNT))) == DATA
        with pytest.raises(RecordError, match="larger than 150 bytes"):
            opened(server, Storage(range_nbytes=100), max_record_nbytes=150)[2]
        with pytest.raises(RecordError, match="larger than 90 bytes"):
            opened(server, max_record_nbytes=90)[0]


def test_an_object_that_changes_between_its_ranges_is_an_error(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(files, Storage(range_nbytes=100))
    answer = files.answer

    def change(method: str, path: str, headers: Any) -> Any:
        found = answer(method, path, headers)
        files.files["/002.jpg"] = bytes(174)
        return found

    monkeypatch.setattr(files, "answer", change)
    with pytest.raises(SourceError, match="was changed since it was opened"):
        source[2]


def test_a_cache_is_filled_by_batches_and_read_afterwards(files: Files, tmp_path: Path) -> None:
    source = opened(files, Storage(cache=str(tmp_path / "cache"))).map(encoded)
    assert batch_of(source, list(range(COUNT))) == DATA
    files.requests.clear()
    assert batch_of(source, list(range(COUNT))) == DATA
    assert {wanted for _, _, wanted in files.requests} == {"bytes=0-0"}, "only their versions are looked up"
    files.files["/003.jpg"] = b"changed"
    assert batch_of(source, [2, 3, 4]) == [DATA[2], b"changed", DATA[4]]


def test_a_cache_that_is_too_small_is_read_past(files: Files, tmp_path: Path) -> None:
    source = opened(files, Storage(cache=str(tmp_path / "cache"), cache_nbytes=150)).map(encoded)
    with pytest.warns(RuntimeWarning, match="not kept: a copy of"):
        assert batch_of(source, list(range(5))) == DATA[:5]


class OwnError(Exception):
    """As gcsfs has: an error that derives from nothing else, with a code."""

    code = 416


def test_an_empty_object_is_read_where_a_range_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    read = type(memory).cat_file

    def refuse(self: Any, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        if path.endswith("/missing.jpg") or not self.size(path):
            raise OwnError
        return read(self, path, start, end, **options)

    monkeypatch.setattr(type(memory), "cat_file", refuse)
    memory.pipe({"/empty/a.jpg": b"", "/empty/b.jpg": b"b", "/empty/missing.jpg": b"c"})
    try:
        source = penstock.open("memory://empty/", format="images", fields=["encoded"])
        assert isinstance(source, Source)
        with connections_ended():
            assert batch_of(source.map(encoded), [0, 1]) == [b"", b"b"]
            with pytest.raises(SourceError, match=r"memory://empty/missing\.jpg was changed"):
                source[2]
    finally:
        memory.rm("/empty", recursive=True)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with serving() as address:
        put(address, {f"{number}.jpg": DATA[number] for number in range(4)} | {"empty.jpg": b""})
        with connections_ended(), Proxy(*address).running() as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            yield proxy


def test_objects_in_s3_are_one_request_each(s3: Proxy) -> None:
    source = penstock.open("s3://bucket/", format="images", fields=["encoded"], storage=PATIENT)
    assert isinstance(source, Source)
    s3.requests.clear()
    assert batch_of(source.map(encoded), [0, 1, 2, 3]) == DATA[:4]
    assert [method for method, _, _ in s3.requests] == ["GET"] * 4
    assert encoded(source[4]) == b"", "an empty object has no range, and no error"
    s3.requests.clear()
    sent = pickle.loads(pickle.dumps(source))
    assert [encoded(sample) for sample in batch_of(sent, [1, 2])] == DATA[1:3]
    assert len(s3.requests) == 2, "a source that was sent takes its list along"
    s3.plan = FaultPlan(["500", "cut", "reset"])
    assert batch_of(source.map(encoded), [0, 1, 2, 3]) == DATA[:4]
    large = penstock.open("s3://bucket/", format="images", fields=["encoded"], storage=Storage(range_nbytes=150))
    assert isinstance(large, Source)
    assert batch_of(large.map(encoded), [0, 3, 4]) == [DATA[0], DATA[3], b""]


def test_what_a_listing_says_of_versions_spares_requests_with_a_cache(s3: Proxy, tmp_path: Path) -> None:
    storage = Storage(cache=str(tmp_path / "cache"), retries=20, timeout_s=600, stall_s=60)
    source = penstock.open("s3://bucket/", format="images", fields=["encoded"], storage=storage)
    assert isinstance(source, Source)
    s3.requests.clear()
    assert batch_of(source.map(encoded), [0, 1, 4]) == [DATA[0], DATA[1], b""]
    assert [method for method, _, _ in s3.requests] == ["GET", "GET"], "one each, and none for an empty one"
    s3.requests.clear()
    sent = pickle.loads(pickle.dumps(source))
    assert batch_of(sent.map(encoded), [0, 1, 4]) == [DATA[0], DATA[1], b""]
    assert encoded(source[1]) == DATA[1]
    assert s3.requests == []
    server = urlsplit(s3.url)
    put((str(server.hostname), int(server.port or 0)), {"1.jpg": b"new", "2.jpg": b"changed"})
    assert batch_of(source.map(encoded), [1]) == [DATA[1]], "the copy"
    with pytest.raises(SourceError, match=r"2\.jpg was changed since it was opened"):
        batch_of(source.map(encoded), [2])
    again = penstock.open("s3://bucket/", format="images", fields=["encoded"], storage=storage)
    assert isinstance(again, Source)
    assert batch_of(again.map(encoded), [2, 1]) == [b"changed", b"new"]
