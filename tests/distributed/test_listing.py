"""A remote folder is listed once for a job, however many ranks and workers it has. Under the real torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import listing
import pytest
from faulty_storage import Files
from torchrun import RankCases

import penstock

pytestmark = pytest.mark.long

CASES = {4: ["share", "group", "missing", "different"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Files]:
    folders = ("share", "group", "alone")
    images = {
        f"/{folder}/{number:02d}.jpg": f"{number}".encode() for folder in folders for number in range(listing.COUNT)
    }
    with Files(images).running() as server:
        yield server


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, server: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankCases]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVED", server.url)
        yield RankCases(Path(listing.__file__), CASES, tmp_path_factory.mktemp("listing"))


def listings(server: Files, folder: str) -> int:
    return sum(path.startswith(f"/{folder}/") and path.endswith("/") for _, path, _ in server.requests)


@pytest.mark.parametrize("case", ["share", "group"])
def test_ranks_and_workers_together_list_as_often_as_one_process(ranks: RankCases, server: Files, case: str) -> None:
    ranks.assert_passed(case, 4)
    before = listings(server, "alone")
    assert len(penstock.open(f"{server.url}/alone/")) == listing.COUNT
    assert listings(server, case) == listings(server, "alone") - before > 0


@pytest.mark.parametrize("case", ["missing", "different"])
def test_no_rank_waits_for_a_list_that_it_cannot_have(ranks: RankCases, case: str) -> None:
    ranks.assert_passed(case, 4)


def test_a_folder_whose_format_is_guessed_is_listed_as_often_as_one_whose_format_is_said(server: Files) -> None:
    before = listings(server, "alone")
    penstock.open(f"{server.url}/alone/", format="images")
    said = listings(server, "alone") - before
    penstock.open(f"{server.url}/alone/")
    assert listings(server, "alone") - before == 2 * said > 0
