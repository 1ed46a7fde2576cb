"""The ranks of a machine have one cache of samples in memory, if they want that. Under the real torchrun."""

from __future__ import annotations

from pathlib import Path

import caching
import pytest
from torchrun import RankCases

import penstock
from penstock.core.errors import OptionError

pytestmark = pytest.mark.long

CASES = {3: ["share", "group", "alone", "different", "impossible"]}


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> RankCases:
    return RankCases(Path(caching.__file__), CASES, tmp_path_factory.mktemp("caching"))


@pytest.mark.parametrize("case", ["share", "group"])
def test_each_sample_is_made_once_for_all_ranks_of_a_machine(ranks: RankCases, case: str) -> None:
    ranks.assert_passed(case, 3)


def test_without_distributed_each_rank_has_its_own(ranks: RankCases) -> None:
    ranks.assert_passed("alone", 3)


@pytest.mark.parametrize("case", ["different", "impossible"])
def test_no_rank_waits_for_a_cache_that_it_cannot_have(ranks: RankCases, case: str) -> None:
    ranks.assert_passed(case, 3)


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert penstock.cached([1, 2], "ram", limit="1MiB", distributed=True)[1] == 2
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=r"there are 2 ranks, and torch\.distributed does not know them yet"):
        penstock.cached([1, 2], "ram", limit="1MiB", distributed=True)
