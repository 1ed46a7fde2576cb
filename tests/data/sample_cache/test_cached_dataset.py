"""`penstock.cached`: the samples of the dataset, each made once by all workers together, or refused with a reason."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nested_equal import assert_same
from other_users import NOBODY, needs_root
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import penstock
from penstock.core.errors import OptionError, SourceError, TransportError
from penstock.core.random_states import draw_once
from penstock.core.shared_bytes import SharedBytes
from penstock.data.sample_cache import sample_file
from penstock.loader.checkpoint.dataset_fingerprint import fingerprint
from penstock.loader.scheduling.purity import why_impure
from penstock.loader.workers.worker_spec import WorkerSpec

COUNT = 24


class Pictures(Dataset[Any]):
    """Counts, for all processes, how often each sample is made."""

    classes = ("cat", "dog")

    def __init__(self, change: Callable[[int], object] = lambda _: None) -> None:
        self.made = SharedBytes(COUNT)
        self.change = change

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < COUNT:
            raise IndexError(index)
        self.made.memory[index] += 1
        self.change(index)
        return {"x": torch.full((3, 5), float(index)), "y": np.arange(index), "index": index, "name": f"ä{index}"}

    @property
    def counts(self) -> list[int]:
        return [*self.made.memory]


class Bulk(Pictures):
    asked: list[list[int]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked = [*getattr(self, "asked", []), [*indices]]
        return [self[index] for index in indices]


class Numbers(penstock.Source):
    where = "numbers"

    def __len__(self) -> int:
        return COUNT

    def read(self, index: int) -> dict[str, Any]:
        return {"x": index, "y": -index}


@pytest.fixture(params=["ram", "disk"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    path = {"path": tmp_path / "samples"} if request.param == "disk" else {}
    return lambda dataset, **options: penstock.cached(dataset, request.param, **{"limit": "4MiB", **path, **options})


def samples(loader: Any) -> list[Any]:
    return sorted((sample for batch in loader for sample in batch), key=lambda sample: int(sample["index"]))


def listed(batch: list[Any]) -> list[Any]:
    return [{**sample, "y": sample["y"].tolist()} for sample in batch]


EXPECTED = listed([Pictures()[index] for index in range(COUNT)])


# ── the same samples ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [TorchLoader, penstock.DataLoader])
@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
        {"num_workers": 2, "worker_type": "thread"},
    ],
    ids=["inline", "fork", "persistent", "thread"],
)
def test_epochs_have_the_datasets_samples_and_the_second_makes_none(
    kept: Callable[..., Any], kind: Any, how: dict[str, Any]
) -> None:
    if kind is TorchLoader and "worker_type" in how:
        pytest.skip("torch has no worker threads")
    dataset = Pictures(nothing)
    cached = kept(dataset)
    loader = kind(cached, batch_size=4, shuffle=True, collate_fn=listed, **how)
    for _ in range(3):
        assert_same(samples(loader), EXPECTED)
    remade = sum(dataset.counts) - COUNT
    processes = 1 + how["num_workers"] * 3
    assert remade == 0 if is_ram(cached) else remade <= 2 * processes  # of a file, each process makes two again
    info = cached.cache_info()
    assert (info.entries, info.misses, info.hits, info.full) == (COUNT, COUNT, 2 * COUNT, False)
    assert 0 < info.nbytes < info.limit_nbytes == 4 << 20


@pytest.mark.usefixtures("preloaded_python")
def test_spawned_workers_share_what_is_kept(kept: Callable[..., Any]) -> None:
    dataset = Pictures(nothing)
    cached = kept(dataset)
    loader = TorchLoader(cached, batch_size=4, collate_fn=listed, num_workers=2, multiprocessing_context="spawn")
    assert_same(samples(loader), EXPECTED)
    made = dataset.counts
    assert_same(listed([cached[index] for index in range(COUNT)]), EXPECTED)
    assert sum(dataset.counts) - sum(made) == (0 if is_ram(cached) else 2)
    assert cached.cache_info().hits >= COUNT


def nothing(_: int) -> None:
    pass


def is_ram(cached: Any) -> bool:
    return "memory" in cached._cache._file.name


def test_a_shuffled_loader_has_the_batches_of_one_without_a_cache(kept: Callable[..., Any]) -> None:
    orders = []
    for dataset in (Pictures(), kept(Pictures())):
        torch.manual_seed(3)
        loader = penstock.DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=listed)
        orders.append([*loader, *loader, torch.rand(2).tolist()])
    assert_same(*orders)


@pytest.mark.parametrize("seed", [None, 5])
def test_random_transforms_after_the_cache_draw_what_they_draw_without_it(
    kept: Callable[..., Any], seed: int | None
) -> None:
    class Augmented(Dataset[Any]):
        def __init__(self, pictures: Any) -> None:
            self.pictures = pictures

        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> Any:
            return self.pictures[index]["x"] + torch.rand(1) + random.random() + penstock.sample_rng().random()

    found = []
    for pictures in (Pictures(), kept(Pictures())):
        torch.manual_seed(3)
        loader = penstock.DataLoader(Augmented(pictures), batch_size=4, num_workers=1, seed=seed)
        found.append([*loader, *loader])
    assert_same(*found)
    assert not torch.equal(found[0][0], found[0][COUNT // 4])


def test_a_program_may_write_to_its_samples(kept: Callable[..., Any]) -> None:
    cached = kept(Pictures())
    for _ in range(3):
        sample = cached[5]
        assert_same(listed([sample]), [EXPECTED[5]])
        sample["x"].zero_()
        sample["y"][:] = 9
        sample["new"] = 1


def test_other_indices_go_to_the_dataset(kept: Callable[..., Any]) -> None:
    cached = kept([*"abc"])
    assert (cached[np.int64(1)], cached[torch.tensor(1)], cached[-1], cached[0:2], len(cached)) == (
        "b",
        "b",
        "c",
        ["a", "b"],
        3,
    )
    assert [*cached] == [*"abc"]
    with pytest.raises(IndexError):
        cached[3]
    assert penstock.cached(Pictures(), "ram", limit="1MiB").classes == ("cat", "dog")


def test_a_dataset_that_makes_whole_batches_is_asked_for_what_is_missing(kept: Callable[..., Any]) -> None:
    dataset = Bulk()
    cached = kept(dataset)
    assert not hasattr(Pictures(), "__getitems__")
    assert penstock.cached(Pictures(), "ram", limit="1MiB").__getitems__ is None
    assert_same(listed(cached.__getitems__([3, 1, 3])), [EXPECTED[index] for index in (3, 1, 3)])
    assert_same(listed(cached.__getitems__([1, 2, 3])), [EXPECTED[index] for index in (1, 2, 3)])
    assert dataset.asked == [[3, 1, 3], [2]]
    for loader in (TorchLoader, penstock.DataLoader):
        assert_same(samples(loader(cached, batch_size=5, collate_fn=listed)), EXPECTED)


def test_copies_and_pickles_share_what_is_kept(kept: Callable[..., Any]) -> None:
    cached = kept(TensorDataset(torch.arange(6)))
    assert cached[2] == (torch.tensor(2),)
    for other in (copy.deepcopy(cached), pickle.loads(pickle.dumps(cached))):
        assert_same(other[2], cached[2])
        assert other.cache_info().entries == 1
    assert cached.cache_info().hits == 4


# ── sources ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_functions_of_map_are_called_each_time_unless_their_results_are_kept() -> None:
    calls: list[int] = []

    def double(sample: dict[str, int]) -> int:
        calls.append(sample["x"])
        return sample["x"] * 2

    for after, expected in (("decode", [5, 5]), ("map", [5])):
        source = Numbers().map(double).select(range(3, 9)).cached("ram", after=after, limit="1MiB")  # type: ignore[arg-type]
        assert (source[2], source[2], calls) == (10, 10, expected)
        calls.clear()
    fields = Numbers().select_fields(["y"]).cached("ram", limit="1MiB")
    assert (fields[3], fields[3], type(fields).__name__) == ({"y": -3}, {"y": -3}, "Cached")
    assert fields.cache_info().hits == 1  # type: ignore[attr-defined]
    assert [*penstock.cached(Numbers(), "ram", limit="1MiB").filter(lambda sample: sample["x"] > 21)] == [
        {"x": 22, "y": -22},
        {"x": 23, "y": -23},
    ]


def test_a_mixture_is_not_cached_but_its_sources_are() -> None:
    with pytest.raises(OptionError, match="others in each epoch"):
        penstock.mix([(Numbers(), 1)]).cached("ram")
    cached = penstock.cached(Numbers(), "ram", limit="1MiB")
    mixture = penstock.mix([(cached, 1)], shuffle=True)
    for epoch in range(2):
        mixture.set_epoch(epoch)
        assert sorted(sample["x"] for sample in mixture) == [*range(COUNT)]
    assert cached.cache_info().hits == COUNT


def test_what_keeps_no_state_keeps_none_when_it_is_cached() -> None:
    def reason(dataset: Any) -> str:
        spec = {"iterable": False, "auto_collation": True, "drop_last": False}
        return why_impure(WorkerSpec(dataset=dataset, collate_fn=torch.utils.data.default_collate, **spec))

    assert reason(penstock.cached(TensorDataset(torch.arange(4)), "ram", limit="1MiB")) == ""
    assert reason(penstock.cached(Pictures(), "ram", limit="1MiB")) == "Pictures may keep a state"
    assert reason(Numbers().cached("ram", limit="1MiB")) == "Numbers may keep a state"


def test_a_checkpoint_knows_a_dataset_with_a_cache_as_the_one_without() -> None:
    data = TensorDataset(torch.arange(8))
    assert fingerprint(penstock.cached(data, "ram", limit="1MiB")) == fingerprint(data) != {}
    assert fingerprint(Numbers().cached("ram", limit="1MiB")) == fingerprint(Numbers()) != {}


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("torch's", lambda _: torch.rand(1)),
        (r"Python's \(random\)", lambda _: random.random()),
        (r"NumPy's \(numpy.random\)", lambda _: np.random.rand()),
        ("torch's, NumPy's", lambda _: (torch.manual_seed(1), np.random.seed(1), torch.rand(1))),
    ],
    ids=["torch", "random", "numpy", "seeded"],
)
def test_a_sample_that_draws_is_refused(
    kept: Callable[..., Any], name: str, draw: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.active_count", lambda: 1)  # other tests may have left some
    cached = kept(Pictures(draw))
    with pytest.raises(OptionError, match=f"sample 3 was made with random numbers.*{name}"):
        cached[3]
    draw_once()
    with pytest.raises(OptionError, match="made with random numbers"):
        kept(Bulk(draw), **({} if is_ram(cached) else {"path": cached._cache._file.name + "2"})).__getitems__([1, 2])
    assert cached.cache_info().entries == 0


@pytest.mark.parametrize("draw", [penstock.sample_rng, penstock.sample_seed])
def test_a_sample_with_randomness_of_its_own_is_refused(
    draw: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.active_count", lambda: 1)  # other tests may have left some
    cached = penstock.cached(Pictures(lambda _: draw()), "ram", limit="1MiB")
    for seed in (None, 5):
        with pytest.raises(OptionError, match=r"penstock.sample_rng|torch's"):
            next(iter(penstock.DataLoader(cached, batch_size=4, seed=seed, collate_fn=listed)))


def test_where_another_thread_draws_only_samples_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.active_count", lambda: 2)
    innocent = penstock.cached(Pictures(lambda _: torch.rand(1)), "ram", limit="1MiB")  # as if a thread had done it
    assert_same(listed([innocent[3], innocent[3]]), [EXPECTED[3]] * 2)

    class Noisy(Pictures):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "x": torch.rand(3)}

    with pytest.raises(OptionError, match="made with random numbers"):
        penstock.cached(Noisy(), "ram", limit="1MiB")[3]


def test_what_a_first_import_draws_is_no_sample(kept: Callable[..., Any]) -> None:
    imported: list[int] = []
    cached = kept(Pictures(lambda index: imported or (imported.append(index), random.random())))
    assert_same(listed([cached[3], cached[3]]), [EXPECTED[3]] * 2)


def test_what_has_no_samples_by_number_or_a_state_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    class Stateful(Pictures):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    for dataset, reason in ((Stream(), "Stream has none"), ({1, 2}, "set has none"), (Stateful(), "has a state")):
        with pytest.raises(OptionError, match=reason):
            penstock.cached(dataset, "ram")


def test_options_are_checked(tmp_path: Path) -> None:
    for where, options, reason in (
        ("gpu", {}, "in 'ram' or on 'disk'"),
        ("disk", {}, "needs path="),
        ("ram", {"path": tmp_path}, "in 'ram' has none"),
        ("ram", {"limit": "much"}, "is not a size"),
        ("ram", {"limit": 1 << 61}, "lower limit="),
        ("ram", {"limit": 1 << 70}, "no memory of .* can be shared .*lower limit="),
        ("ram", {"limit": f"{'9' * 400}GiB"}, "limit: .* is not a size"),
        ("disk", {"path": tmp_path / "no" / "folder"}, "no cache of samples can be made"),
        ("disk", {"path": tmp_path}, "no cache of samples can be made"),
    ):
        with pytest.raises(OptionError, match=reason):
            penstock.cached([1], where, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="after 'decode' or 'map'"):
        Numbers().cached("ram", after="all")  # type: ignore[arg-type]
    assert penstock.cached([1], "ram").cache_info().limit_nbytes > 1 << 20
    assert penstock.cached([1], "disk", path=tmp_path / "a").cache_info().limit_nbytes > 1 << 20


# ── limits and failures ─────────────────────────────────────────────────────────────────────────────────────


def test_a_full_cache_makes_the_other_samples_each_time(kept: Callable[..., Any]) -> None:
    dataset = Pictures()
    one = penstock.cached(Pictures(), "ram", limit="1MiB")
    assert one[0] is not None
    cached = kept(dataset, limit=6 * one.cache_info().nbytes)
    for _ in range(3):
        assert_same(samples(penstock.DataLoader(cached, batch_size=4, collate_fn=listed)), EXPECTED)
    info = cached.cache_info()
    assert info.full
    assert 2 <= info.entries <= 6
    assert info.nbytes <= info.limit_nbytes
    assert dataset.counts[-1] == 3


def test_a_disk_without_room_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = penstock.cached(Pictures(), "disk", path=tmp_path / "a", limit="1MiB")
    assert cached[0] is not None

    def pwritev(fd: int, data: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sample_file.os, "pwritev", pwritev)
    with pytest.warns(UserWarning, match="takes no more samples: No space left") as warned:
        assert_same(listed([cached[index] for index in range(COUNT)]), EXPECTED)
    assert len(warned) == 1
    assert cached.cache_info().full


def test_a_damaged_sample_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    dataset = Pictures(nothing)
    cached = penstock.cached(dataset, "disk", path=path, limit="1MiB")
    assert_same(listed([cached[index] for index in range(COUNT)]), EXPECTED)
    path.write_bytes(path.read_bytes()[:-300])
    again = penstock.cached(dataset, "disk", path=path, limit="1MiB")
    with pytest.warns(UserWarning, match="is damaged, and made anew"):
        assert_same(listed([again[index] for index in range(COUNT)]), EXPECTED)
    made = dataset.counts
    assert_same(listed([again[index] for index in range(COUNT)]), EXPECTED)
    assert dataset.counts == made


def test_a_worker_that_is_killed_while_it_makes_a_sample_loses_nothing(kept: Callable[..., Any]) -> None:
    dies = SharedBytes(1)
    dies.memory[0] = 1

    def change(index: int) -> None:
        if index == 9 and dies.memory[0]:
            dies.memory[0] = 0
            os.kill(os.getpid(), signal.SIGKILL)

    cached = kept(Pictures(change))
    loader = penstock.DataLoader(cached, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=listed)
    with pytest.warns(Warning, match="worker"):
        assert_same(samples(loader), EXPECTED)
    assert_same(samples(loader), EXPECTED)
    assert cached.cache_info().entries == COUNT


def test_a_worker_that_is_killed_in_the_middle_of_a_write_loses_nothing(
    kept: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = kept(Pictures())
    left, whole, parent = SharedBytes(1), os.pwrite, os.getpid()
    left.memory[0] = 5

    def pwritev(fd: int, data: Any, at: int) -> int:
        joined = b"".join(data)
        if left.memory[0] and os.getpid() != parent:
            left.memory[0] -= 1
            if not left.memory[0]:
                whole(fd, joined[: len(joined) // 2], at)
                os.kill(os.getpid(), signal.SIGKILL)
        return whole(fd, joined, at)

    monkeypatch.setattr(sample_file.os, "pwritev", pwritev)
    loader = penstock.DataLoader(cached, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=listed)
    with pytest.warns(Warning, match="worker"):
        assert_same(samples(loader), EXPECTED)
    assert left.memory[0] == 0
    assert_same(samples(loader), EXPECTED)
    assert cached.cache_info().entries in (COUNT, COUNT - 1)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_next_program_reads_what_this_one_has_made(tmp_path: Path) -> None:
    first, second = Pictures(nothing), Pictures(nothing)
    for dataset in (first, second):
        cached = penstock.cached(dataset, "disk", path=tmp_path / "a", limit="1MiB")
        assert_same(listed([cached[index] for index in range(COUNT)]), EXPECTED)
    assert sum(second.counts) == 2  # which are compared


@pytest.mark.parametrize("other", ["transform", "length", "class", "indices"])
def test_a_file_of_another_dataset_is_refused(tmp_path: Path, other: str) -> None:
    path = tmp_path / "a"
    penstock.cached(TensorDataset(torch.arange(6)), "disk", path=path, limit="1MiB")
    changed: Any = {
        "length": TensorDataset(torch.arange(7)),
        "class": torch.utils.data.Subset(TensorDataset(torch.arange(6)), range(6)),
    }
    if other in changed:
        with pytest.raises(SourceError, match="remove the file, or pass another path"):
            penstock.cached(changed[other], "disk", path=path)
        return
    one = Numbers().map(lambda sample: sample["x"]) if other == "transform" else Numbers().select([1, 2, 3])
    two = Numbers().map(lambda sample: sample["y"]) if other == "transform" else Numbers().select([1, 2, 4])
    one.cached("disk", path=tmp_path / "b", after="map")
    with pytest.raises(SourceError, match="of other classes, functions, files or indices"):
        two.cached("disk", path=tmp_path / "b", after="map")


@pytest.mark.parametrize("kind", ["tokens", "jsonl", "lmdb", "folder", "dataset"])
def test_a_changed_file_of_a_source_is_noticed_whichever_samples_are_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").mkdir()
    suffix = kind if kind in ("jsonl", "lmdb") else "npy"
    paths = [tmp_path / f"data/{number}.{suffix}" for number in range(3)]
    for path in paths:
        if kind == "lmdb":
            with pytest.importorskip("lmdb").open(str(path), subdir=False) as file, file.begin(write=True) as writing:
                writing.put(b"a", b"b")
        elif kind == "jsonl":
            path.write_text('{"x": 1}\n')
        else:
            np.save(path, np.arange(4))

    def cached() -> Any:
        options: dict[str, Any] = {"tokens": {"length": 2}, "jsonl": {"index": True}}.get(kind, {})
        made: dict[str, Any] = {"dataset": Named([*map(str, paths)]), "folder": InFolder(str(tmp_path / "data"))}
        dataset = made.get(kind) or penstock.open(f"{tmp_path}/data/*.{suffix}", **options)
        return penstock.cached(dataset, "disk", path=tmp_path / "samples", limit="1MiB")

    first = cached()
    assert len([first[index] for index in range(len(first))]) >= 3
    os.utime(paths[1], ns=(0, 0))
    with pytest.raises(SourceError, match="of other classes, functions, files or indices"):
        cached()


class InFolder(Numbers):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def read_paths(self) -> list[str]:
        return [self.folder]


class Named(Dataset[Any]):
    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return int(np.load(self.paths[index])[0])


class Runs:
    """Its pickle fails the test that loads it."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was run",)


def test_a_pickle_in_a_file_is_not_run(tmp_path: Path) -> None:
    penstock.cached(Pictures(), "disk", path=tmp_path / "a", limit="1MiB")[5]
    content = pickle.dumps(Runs())
    head = np.array([0, len(content)], "<i8").tobytes()
    file = sample_file.SampleFile(partial(os.open, tmp_path / "a", os.O_RDWR), 0, COUNT, "a")
    file.limit_nbytes = 1 << 20
    file.add(5, [head + content], instead_of=file.entry(5), has_crc=True)
    with pytest.raises((SourceError, ValueError)):
        penstock.cached(Pictures(), "disk", path=tmp_path / "a")[5]


@needs_root
def test_a_file_of_another_user_is_refused_and_left(tmp_path: Path) -> None:
    for put in ("whole", "empty"):
        path = tmp_path / put
        path.touch()
        if put == "whole":
            penstock.cached(Pictures(), "disk", path=path, limit="1MiB")[5]
        os.chown(path, NOBODY, NOBODY)
        before = path.read_bytes()
        with pytest.raises(SourceError, match="belongs to another user"):
            penstock.cached(Pictures(), "disk", path=path, limit="1MiB")
        assert path.read_bytes() == before


def test_a_file_is_this_users_alone_and_no_link_is_followed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        penstock.cached(Pictures(), "disk", path=tmp_path / "a", limit="1MiB")[5]
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    (tmp_path / "mine").touch()
    (tmp_path / "b").symlink_to("mine")
    (tmp_path / "c").symlink_to("new")
    for name in ("b", "c"):
        with pytest.raises(SourceError, match="is a link"):
            penstock.cached(Pictures(), "disk", path=tmp_path / name, limit="1MiB")
    assert not (tmp_path / "mine").read_bytes()
    assert not (tmp_path / "new").exists()
    os.mkfifo(tmp_path / "d")
    with pytest.raises(SourceError, match="no ordinary file"):
        penstock.cached(Pictures(), "disk", path=tmp_path / "d", limit="1MiB")


def test_data_that_changed_under_the_same_dataset_is_noticed(tmp_path: Path) -> None:
    scale = [1.0]

    class Scaled(Pictures):
        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), index + scale[0])

    assert penstock.cached(Scaled(), "disk", path=tmp_path / "a", limit="1MiB")[4][0] == 5
    scale[0] = 2
    with pytest.raises(SourceError, match="another sample 4 than the dataset makes now"):
        penstock.cached(Scaled(), "disk", path=tmp_path / "a", limit="1MiB")[4]


@pytest.mark.parametrize("kind", [TorchLoader, penstock.DataLoader])
def test_workers_of_a_later_epoch_keep_to_the_file_that_their_program_opened(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "a"
    cached = penstock.cached(Scaled(1), "disk", path=path, limit="1MiB")
    assert [int(cached[index]) for index in (0, 0, 1, 1)] == [0, 0, 1, 1]  # so that nothing is left to compare
    loader = kind(cached, batch_size=COUNT, num_workers=1, multiprocessing_context="fork")
    epochs = [next(iter(loader)).tolist()]
    path.unlink()
    epochs.append(next(iter(loader)).tolist())
    other = penstock.cached(Scaled(100), "disk", path=path, limit="1MiB")
    assert [int(other[index]) for index in range(COUNT)] == [100 * index for index in range(COUNT)]
    epochs.append(next(iter(loader)).tolist())
    assert epochs == [[*range(COUNT)]] * 3


class Scaled(Pictures):
    """Samples by a parameter, which a file of samples does not know."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __getitem__(self, index: int) -> Any:
        return index * self.scale


def test_programs_that_fill_a_file_at_the_same_time_have_the_same_samples(tmp_path: Path) -> None:
    def program() -> None:
        cached = penstock.cached(Pictures(nothing), "disk", path=tmp_path / "a", limit="1MiB")
        assert_same(listed([cached[index] for index in range(COUNT)]), EXPECTED)

    context = multiprocessing.get_context("fork")
    programs = [context.Process(target=program) for _ in range(3)]
    for one in programs:
        one.start()
    for one in programs:
        one.join()
        assert one.exitcode == 0
        one.close()
    cached = penstock.cached(Pictures(nothing), "disk", path=tmp_path / "a", limit="1MiB")
    assert cached.cache_info().entries == COUNT


# ── what it holds ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_that_is_dropped_leaves_no_descriptor(kept: Callable[..., Any]) -> None:
    def use() -> None:
        cached = kept([*range(9)])
        assert cached[1] == cached[1] == 1
        assert pickle.loads(pickle.dumps(cached))[1] == 1

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        use()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pickle_of_memory_that_is_gone_is_refused() -> None:
    cached = penstock.cached([1, 2], "ram", limit="1MiB")
    pickled = pickle.dumps(cached)
    del cached
    with pytest.raises(TransportError, match="shared memory"):
        pickle.loads(pickled)


def test_memory_takes_pages_only_as_it_fills() -> None:
    cached = penstock.cached([bytes(1000)] * 50, "ram", limit="64GiB")
    assert all(cached[index] == bytes(1000) for index in range(50))
    (fd,) = {os.stat(f"/proc/self/fd/{cached._cache._file._descriptor()}").st_blocks * 512}
    assert fd < 4 << 20
