"""What a program was given as a secret stands in no file and no report of its run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from launch.programs import penstock, script

pytestmark = pytest.mark.usefixtures("preloaded_python")

SECRET = "s3cr-t"
PROGRAM = f"""
    import os, sys, torch
    from torch.utils.data import DataLoader, Dataset

    class Items(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.zeros(4)

    os.umask(0o077)
    for batch in DataLoader(Items(), batch_size=4):
        pass
    assert {SECRET!r} in " ".join(sys.argv)
    raise ValueError("no access to https://me:{SECRET}@host/a?sig={SECRET} with HF_TOKEN={SECRET}")
"""


def test_no_secret_is_in_what_a_run_leaves(tmp_path: Path) -> None:
    words = ["--hf-token", SECRET, f"--key={SECRET}", f"WANDB_API_KEY={SECRET}", "--data", f"s3://me:{SECRET}@bucket/a"]
    program = script(tmp_path, PROGRAM)
    done = penstock(tmp_path, "run", "--trace", "trace.json", program.name, *words)
    assert done.returncode == 1
    report = done.stderr.partition("penstock: train.py")[2]  # before it, Python has printed the exception itself
    assert "--hf-token … --key=… WANDB_API_KEY=… --data s3://bucket/a" in report
    assert SECRET not in report
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != program]
    assert {path.name for path in files} >= {"run.json", "report.html", "trace.json"}
    for path in files:
        assert SECRET.encode() not in path.read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = penstock(tmp_path, "report"), penstock(tmp_path, "report", "--json")
    assert all(SECRET not in one.stdout + one.stderr and one.returncode == 0 for one in told)


def test_a_record_of_an_older_version_is_shown_without_secrets_too(tmp_path: Path) -> None:
    penstock(tmp_path, "run", "--json", "run.json", script(tmp_path, "print(1)").name)
    file = tmp_path / "run.json"
    file.write_text(file.read_text().replace('"train.py"', f'"train.py", "--hf-token", "{SECRET}"'))
    done = penstock(tmp_path, "report", "run.json", "--html", "page.html")
    assert done.returncode == 0
    assert "--hf-token …" in (tmp_path / "page.html").read_text()
    assert SECRET not in (tmp_path / "page.html").read_text()
    assert SECRET not in penstock(tmp_path, "report", "run.json").stdout


def test_no_secret_is_in_what_the_doctor_says(tmp_path: Path) -> None:
    program = script(tmp_path, PROGRAM)
    for more in ([], ["--json"]):
        done = penstock(tmp_path, "doctor", "--seconds", "2", *more, program.name, "--hf-token", SECRET)
        assert SECRET not in done.stdout
    done = penstock(tmp_path, "inspect", f"https://me:{SECRET}@127.0.0.1:1/a.parquet?sig={SECRET}")
    assert done.returncode == 2
    assert SECRET not in done.stderr
