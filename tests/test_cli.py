"""The command's verbs and flags are a promise."""

from __future__ import annotations

import argparse
import re

import pytest

import penstock
from penstock import cli


def test_the_verbs_and_their_flags_are_these() -> None:
    flags = {}
    for verb in cli.VERBS:
        parser = argparse.ArgumentParser()
        verb.options(parser)
        flags[verb.name] = sorted(option for action in parser._actions for option in action.option_strings)
    assert flags == {
        "run": ["--baseline", "--help", "--json", "--quiet", "-h", "-m"],
        "doctor": ["--device", "--dtype", "--help", "--json", "--shape", "--transfer", "-h"],
        "plan": ["--budget", "--help", "--json", "-h"],
        "report": ["--help", "--json", "-h"],
        "watch": ["--help", "--json", "-h"],
    }


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^\s+{verb.name}\s", text, re.MULTILINE) for verb in cli.VERBS)


def test_a_file_that_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert cli.main(["report", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_plan_prints_what_fits(tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned.py").write_text(
        "import torch\n"
        "def step():\n"
        "    model = torch.nn.Linear(64, 64)\n"
        "    def loss_fn(model, x):\n"
        "        return model(x).sum(), len(x)\n"
        "    return model, loss_fn, torch.zeros(256, 64), torch.optim.Adam(model.parameters())\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "planned:step", "--budget", "10MiB"]) == 0
    assert "choose 256" in capsys.readouterr().out
    assert cli.main(["plan", "planned:step", "--budget", "10KiB"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert cli.main(["plan", "planned:nothing", "--budget", "10KiB"]) == 2
    assert cli.main(["plan", "planned:step", "--budget", "ten"]) == 2
    assert "'ten' is no size" in capsys.readouterr().err
