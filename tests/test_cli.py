"""The command's verbs and flags are a promise."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import penstock
import penstock.cli.report
import penstock.cli.run
from penstock import cli
from penstock.cli.verb import Verb


def test_the_verbs_and_their_flags_are_these() -> None:
    flags = {}
    for verb in cli.verbs():
        parser = argparse.ArgumentParser()
        verb.add_arguments(parser)
        flags[verb.name] = sorted(option for action in parser._actions for option in action.option_strings)
    assert flags == {
        "run": [
            "--baseline",
            "--help",
            "--html",
            "--json",
            "--prometheus",
            "--quiet",
            "--trace",
            "--tune",
            "-h",
            "-m",
        ],
        "watch": ["--help", "--json", "-h"],
        "doctor": [
            "--check",
            "--device",
            "--dtype",
            "--help",
            "--json",
            "--pid",
            "--seconds",
            "--shape",
            "--transfer",
            "-h",
            "-m",
        ],
        "tune": ["--cpus", "--help", "--json", "--ram", "--step", "--step-ms", "-h"],
        "plan": [
            "--all",
            "--allow-batch-dependent",
            "--budget",
            "--forward-only",
            "--help",
            "--json",
            "--ranks",
            "--shard",
            "-h",
        ],
        "report": ["--help", "--html", "--json", "--merge", "--tensorboard", "--trace", "-h"],
        "convert": [
            "--errors",
            "--fields",
            "--format",
            "--help",
            "--json",
            "--option",
            "--overwrite",
            "--quiet",
            "--shard-size",
            "--shards",
            "--to",
            "--verify",
            "--workers",
            "--writer-option",
            "-h",
        ],
        "inspect": ["--format", "--help", "--json", "--option", "--samples", "-h"],
    }


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("-- -m pytest -x", ["-m", "pytest", "-x"]),
        ("--quiet -- train.py -- -x", ["train.py", "--", "-x"]),
        ("-m pytest -- -x", ["-m", "pytest", "--", "-x"]),
        ("-m pytest --quiet", ["-m", "pytest", "--quiet"]),
        ("train.py -m a -- b", ["train.py", "-m", "a", "--", "b"]),
    ],
)
def test_two_dashes_end_the_options_of_run_and_later_ones_are_the_programs(
    line: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = []
    monkeypatch.setattr("penstock.launch.run", lambda command, *_, **__: run.append(command) or 0)
    assert cli.main(["run", *line.split()]) == 0
    assert run == [command]


@pytest.mark.parametrize("name", ["train", "train:", ":step", ""])
def test_a_name_without_a_module_or_an_object_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", name]) == 2
    assert "expected module:object, as in train:step" in capsys.readouterr().err


def test_an_interrupt_is_a_line_and_the_status_of_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.report.Report, "run", interrupted)
    assert cli.main(["report", "run.json"]) == 130
    assert capsys.readouterr().err == "penstock: interrupted\n"
    monkeypatch.setattr(cli.run.Run, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):  # the program's own
        cli.main(["run", "train.py"])


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    show = (
        "from penstock.cli.report import Report; Report.run = lambda *_: print('x' * 10**6) or 0; "
        "from penstock.cli import main; raise SystemExit(main(['report', 'run.json']))"
    )
    reader = subprocess.run(["sh", "-c", f'{sys.executable} -c "$0" | head -c 1', show], capture_output=True, text=True)
    assert (reader.stdout, reader.stderr) == ("x", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_behind_the_output_is_one_line() -> None:
    show = (
        "from penstock.cli.report import Report; Report.run = lambda *_: print('x' * 10**6) or 0; "
        "from penstock.cli import main; raise SystemExit(main(['report', 'run.json']))"
    )
    done = subprocess.run(["sh", "-c", f'{sys.executable} -c "$0" > /dev/full', show], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "penstock: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(("word", "meant"), [("--hlep", "--help"), ("rnu", "run"), ("docter", "doctor")])
def test_a_misspelt_command_is_recognised(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([word])
    assert f"there is no {word!r}; did you mean {meant!r}?" in capsys.readouterr().err


def test_a_file_that_could_not_be_written_at_the_end_is_refused_before_the_program_runs(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('it-ran', 'w')")
    for option in ("--json", "--html", "--trace"):
        assert cli.main(["run", option, "nowhere/run.json", "train.py"]) == 2
        assert "there is no folder nowhere" in capsys.readouterr().err
        assert cli.main(["run", option, ".", "train.py"]) == 2
        assert "is a folder" in capsys.readouterr().err
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train.py --epochs 3", "did you mean `penstock run train.py`?"),
        ("run --basline train.py", "did you mean --baseline?"),
        ("run --epochs 3 train.py", "put options of train.py itself after it: penstock run train.py --epochs"),
        ("doctor --secnods 3 train.py", "did you mean --seconds?"),
        ("report a b c", "unrecognized arguments: c; `penstock report --help`"),
    ],
)
def test_a_line_that_is_nearly_right_is_answered_with_the_right_one(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("run trian.py", "did you mean 'train.py'?"),
        ("run train", "did you mean 'train.py'?"),
        ("run elsewhere/train.py", "give a .py file, or -m and a module"),
        ("run python3.12 train.py", "leave out python3.12"),
        ("run torchrun train.py", "torchrun ... -m penstock run train.py"),
        ("tune nearly_right.py", "for an object of that script, give nearly_right:NAME"),
        ("tune nearly_right:loader", "it has make_loader"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    line: str, meant: str, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "nearly_right.py").write_text("import json\ndef make_loader(): ...\n")
    assert cli.main(line.split()) == 2
    assert meant in capsys.readouterr().err


def test_no_command_at_all_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert [verb.name for verb in cli.verbs() if f"\n    {verb.name} " not in text] == []


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^\s+{verb.name}\s", text, re.MULTILINE) for verb in cli.verbs())


@pytest.mark.parametrize("verb", cli.verbs(), ids=lambda verb: verb.name)
def test_help_ends_with_examples_that_the_command_takes(verb: Verb) -> None:
    (verbs,) = (one for one in cli.command_parser()._actions if one.choices)
    assert len(verb.examples) >= 2
    for line, _ in verb.examples:
        assert f"\n  {line}\n" in verbs.choices[verb.name].format_help()
        assert cli.command_parser().parse_args(shlex.split(line)[1:]).verb.name == verb.name


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
        "def shard(model, mesh):\n"
        "    assert mesh.shape == (4,)\n"
        "    torch.distributed.fsdp.fully_shard(model, mesh=mesh)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "planned:step", "--budget", "10MiB"]) == 0
    assert "choose 256" in capsys.readouterr().out
    assert cli.main(["plan", "planned:step", "--budget", "10KiB"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert cli.main(["plan", "planned:nothing", "--budget", "10KiB"]) == 2
    assert cli.main(["plan", "planned.py"]) == 2
    assert "penstock plan planned:step" in capsys.readouterr().err
    assert cli.main(["plan", "a_module_that_is_not_there:step", "--budget", "ten"]) == 2, "before the program runs"
    assert "'ten' is not a size" in capsys.readouterr().err
    assert cli.main(["plan", "planned:step", "--budget", "10MiB", "--ranks", "4", "--shard", "ddp"]) == 0
    assert "communication" in capsys.readouterr().out
    options = ["--budget", "10MiB", "--ranks", "4", "--shard"]
    assert cli.main(["plan", "planned:step", *options, "hsdp"]) == 2
    assert "shard is 'fsdp2', 'ddp' or a function" in capsys.readouterr().err
    assert cli.main(["plan", "planned:step", *options, "planned:shard"]) == 0
    assert cli.main(["plan", "planned:step", "--budget", "10MiB", "--forward-only"]) == 0
    assert "choose 256: " in capsys.readouterr().out


@pytest.mark.slow
def test_tune_prints_the_line_to_paste_and_keeps_it(
    tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tunable.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.zeros(400, 3)), batch_size=8)\n"
        "def step(batch):\n"
        "    torch.ones(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", "tunable:loader", "--step-ms", "20"]) == 0
    first = capsys.readouterr().out
    assert re.search(r"^penstock\.DataLoader\(\.\.\., num_workers=\d.*\)$", first, re.MULTILINE)
    assert cli.main(["tune", "tunable:loader", "--step", "tunable:step", "--json", "--cpus", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["line"].startswith("penstock.DataLoader(")
    assert cli.main(["tune", "tunable:step"]) == 2
    assert cli.main(["tune", "tunable:loader", "--ram", "much"]) == 2
    assert "'much' is not a size" in capsys.readouterr().err


def test_convert_and_inspect_say_what_they_did(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.h5"
    source.write_text("".join(json.dumps({"x": number, "t": "é"}) + "\n" for number in range(50)))
    assert cli.main(["convert", str(source), str(out), "--fields", "label=x,t", "--verify", "--workers", "0"]) == 0
    text = capsys.readouterr()
    assert re.fullmatch(
        rf"{re.escape(str(out))}: 50 samples, [\d.]+ KiB, in \d+\.\d s\n"
        r"  verified: every sample read back is equal\n  sum-sha256:[0-9a-f]{64}\n",
        text.out,
    )
    assert text.err == ""
    assert cli.main(["convert", str(source), str(out)]) == 2
    assert (
        capsys.readouterr().err
        == f"penstock: {out} exists; --overwrite (overwrite=True) replaces it when the result is complete\n"
    )
    assert cli.main(["convert", str(source), str(out), "--overwrite", "--json", "--workers", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "penstock.convert/1"
    assert cli.main(["convert", str(source), str(out), "--overwrite", "--quiet", "--workers", "0"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["inspect", str(out), "--samples", "1"]) == 0
    text = capsys.readouterr()
    assert "hdf5, 1 file" in text.out
    assert "samples: 50" in text.out
    assert "x  int64, 0 to 49, mean 24.5" in text.out
    assert cli.main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "penstock.inspect/1"


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "nothing.jsonl", "out.h5"],
        ["convert", "in.jsonl", "out.nothing"],
        ["convert", "in.jsonl", "out.h5", "--to", "nothing"],
        ["convert", "in.jsonl", "out.h5", "--fields", "a=,b"],
        ["convert", "in.jsonl", "out.h5", "--fields", "nothing"],
        ["convert", "in.jsonl", "out.h5", "--option", "nothing"],
        ["convert", "in.jsonl", "out.h5", "--option", "nothing=1"],
        ["convert", "in.jsonl", "out.h5", "--writer-option", "nothing=1"],
        ["convert", "in.jsonl", "out.h5", "--shard-size", "much"],
        ["convert", "in.jsonl", "out.h5", "--workers", "-1"],
        ["convert", "in.jsonl", "in.jsonl"],
        ["inspect", "nothing.h5"],
        ["inspect", "in.jsonl", "--format", "hdf5"],
        ["inspect", "in.jsonl", "--option", "nothing=1"],
        ["inspect", "in.jsonl", "--samples", "-1"],
    ],
)
def test_what_cannot_be_converted_or_inspected_is_one_line_and_exit_code_2(
    words: list[str], tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if not line.startswith("penstock: reading ")]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]
