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
        "run": ["--help", "--json", "--quiet", "-h", "-m"],
        "doctor": ["--device", "--dtype", "--help", "--json", "--shape", "--transfer", "-h"],
        "report": ["--help", "--json", "-h"],
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
