"""What DCP keeps of a loader's state is plain data: it runs no code when it is loaded, and is refused else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.core.errors import StateError
from penstock.loader.checkpoint import rank_states
from penstock.loader.checkpoint.rank_states import RankStates

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Ran:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class Odd(Dataset[int]):
    """A dataset with a state that is no plain data."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"odd": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["odd"]


def test_a_state_in_dcp_runs_no_code_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = RankStates({"epoch": 0, "odd": Ran(tmp_path / "ran")})
    with monkeypatch.context() as patch:  # as somebody else writes it
        patch.setattr(rank_states, "_loaded", lambda saved: {})
        dcp.save({"loader": states}, checkpoint_id=tmp_path / "there", no_dist=True)
    loaded = RankStates({})
    dcp.load({"loader": loaded}, checkpoint_id=tmp_path / "there", no_dist=True)
    with pytest.raises(StateError, match=r"what torch.load\(weights_only=True\) reads"):
        loaded.loaded()
    assert not (tmp_path / "ran").exists()


def test_a_state_that_dcp_could_not_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    loader = DataLoader(Odd(Ran(tmp_path / "ran")), num_workers=0)
    next(iter(loader))
    with pytest.raises((StateError, dcp.api.CheckpointException), match="numbers, texts, tensors, arrays"):
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / "there", no_dist=True)
    assert not (tmp_path / "ran").exists()
