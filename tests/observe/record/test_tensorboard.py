"""What is written for TensorBoard is read back by TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import made_runs
import pytest

from penstock.core.errors import OptionError
from penstock.observe.record.tensorboard import scalars, write_scalars


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_reads_every_scalar_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = made_runs.ordinary()
    write_scalars(run, tmp_path / "logs")
    read = EventAccumulator(str(tmp_path / "logs"), size_guidance={"scalars": 0}).Reload()
    wanted: dict[str, list[tuple[float, int, float]]] = {}
    for tag, at_s, step, value in scalars(run):
        wanted.setdefault(tag, []).append((at_s, step, value))
    assert set(read.Tags()["scalars"]) == set(wanted)
    assert "penstock/samples_per_s" in wanted
    assert "penstock/memory_nbytes/device_reserved" in wanted
    for tag, values in wanted.items():
        got = read.Scalars(tag)
        assert [event.step for event in got] == [step for _, step, _ in values]
        assert [event.value for event in got] == pytest.approx([value for *_, value in values])
        assert got[0].wall_time == pytest.approx(1_795_253_400 + values[0][0])


def test_without_tensorboard_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(OptionError, match=r'pip install "penstock\[tensorboard\]"'):
        write_scalars(made_runs.ordinary(), tmp_path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="give another --tensorboard DIR"):
        write_scalars(made_runs.ordinary(), tmp_path / "file")
