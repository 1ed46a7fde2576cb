"""Ranks that share out a stream take as many steps, whatever each has read, also after a checkpoint. Under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import uneven
from one_rank import be_rank
from torchrun import RankCases

import penstock
from penstock import OptionError, RankError
from penstock.distributed.step_counts import StepCounts

CASES = {3: [*uneven.CASES]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    number = 0
    for shard, count in enumerate(uneven.COUNTS):
        lines = [json.dumps({"x": number + k}) for k in range(count)]
        (folder / f"{shard}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        number += count
    return folder


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, folder: Path) -> RankCases:
    return RankCases(Path(uneven.__file__), CASES, folder)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in uneven.CASES if case.startswith("train")])
def test_ranks_train_for_three_epochs_on_a_stream_that_ends_earlier_on_some(ranks: RankCases, case: str) -> None:
    ranks.assert_passed(case, 3)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in uneven.CASES if case.startswith("resume")])
def test_ranks_resume_a_stream_at_any_step_and_still_take_as_many(ranks: RankCases, case: str) -> None:
    ranks.assert_passed(case, 3)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in uneven.CASES if case.startswith("peek")])
def test_a_rank_may_look_at_the_first_batch_of_a_stream_alone(ranks: RankCases, case: str) -> None:
    ranks.assert_passed(case, 3)


@pytest.mark.parametrize("kept", ["pad", "drop"])
def test_ranks_that_cannot_tell_each_other_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    be_rank(monkeypatch, 0, 2)
    stream = penstock.open(sorted(map(str, folder.glob("*.jsonl"))))
    with pytest.raises(OptionError, match="call init_process_group before the loader is made"):
        penstock.DataLoader(stream, distributed=True, uneven=kept)  # type: ignore[arg-type]
    assert penstock.DataLoader(stream, distributed=True, uneven="join") is not None
    with pytest.raises(OptionError, match="uneven='drop' takes distributed=True"):
        penstock.DataLoader(stream, uneven="drop")


class Store(dict[str, str]):
    """The store of ranks that one thread plays."""

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(self.get(key, 0)) + amount)
        return int(self[key])

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def test_a_rank_that_says_nothing_is_an_error_and_finished_rounds_leave_nothing() -> None:
    store = Store()
    alone = StepCounts(store, "alone", 2, 0.0)
    with pytest.raises(RankError, match="only 1 of 2 ranks have said how many batches"):
        alone.agree(4, 4, lambda: None)
    single = StepCounts(store, "single", 1, 9.0)
    assert [single.agree(count, 4, lambda: None) for count in (4, 4, 2)] == [(4, 4), (4, 4), (2, 2)]
    assert [key for key in store if key.startswith("single/0")] == []
