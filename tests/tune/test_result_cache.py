"""Results are kept by dataset, step, limits and machine; a broken file is no error."""

from __future__ import annotations

import json

import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader, TensorDataset
from tuned_machine import Machine

from penstock.tune.result_cache import TuneResultCache, cache_key
from penstock.tune.search_result import TuneResult
from penstock.tune.setting import Setting
from penstock.tune.tuned_loop import TunedLoop


def key(dataset=None, batch_size: int = 8, step_s: float = 0.01, **limits) -> dict:
    loader = DataLoader(dataset or Numbered(64), batch_size=batch_size)
    return cache_key(TunedLoop(loader=loader, step_s=step_s), **limits)


def found() -> TuneResult:
    trial = Machine(step_ms=1, work_ms=2).measure(Setting(workers=2, worker_type="process"), at_least_s=1)
    left_out = ((Setting(workers=9, worker_type="process"), 5),)
    return TuneResult(choice=trial.setting, trials=(trial,), left_out=left_out, ram_nbytes=4, why="so")


def test_a_saved_result_is_loaded_for_the_same_key_only(tmp_path) -> None:
    cache = TuneResultCache(tmp_path)
    assert cache.load(key()) == (None, "")
    assert cache.save(key(), found()) == ""
    assert cache.load(key()) == (found(), "")
    others = [
        key(Numbered(65)),
        key(Numbered(64, (1, 2, 3))),
        key(TensorDataset(torch.zeros(64, 2))),
        key(batch_size=9),
        key(step_s=0.02),
        key(ram_nbytes=5),
    ]
    assert all(cache.load(other) == (None, "") for other in others)


def test_a_dataset_with_other_contents_of_the_same_shape_is_the_same_to_the_tuner() -> None:
    assert key(TensorDataset(torch.zeros(64, 2))) == key(TensorDataset(torch.ones(64, 2)))


def test_other_code_is_another_dataset() -> None:
    class Numbered2(Numbered):
        def __getitem__(self, index: int):
            return super().__getitem__(index)

    Numbered2.__qualname__ = Numbered.__qualname__
    Numbered2.__module__ = Numbered.__module__
    assert key(Numbered2(64)) != key(Numbered(64))


def test_a_broken_file_is_reported_and_replaced(tmp_path) -> None:
    cache = TuneResultCache(tmp_path)
    cache.save(key(), found())
    (file,) = tmp_path.iterdir()
    whole = json.loads(file.read_text())
    whole["found"]["choice"]["workers"] = 7  # nothing that was tried
    broken = ["", "{", "[]", '{"schema": "penstock.tune/1"}', json.dumps(whole), json.dumps({**whole, "schema": "x/9"})]
    for text in broken:
        file.write_text(text)
        result, word = cache.load(key())
        assert result is None
        assert "searching again" in word
    file.write_bytes(b"\xff\xfe\x00")
    assert cache.load(key())[0] is None
    cache.save(key(), found())
    assert cache.load(key()) == (found(), "")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written_is_a_message_and_no_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert "the result is not kept" in TuneResultCache(tmp_path / "file").save(key(), found())
