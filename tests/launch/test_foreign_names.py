"""Names that somebody else has chosen do not control the terminal that they are printed to."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch.programs import penstock, script

from penstock.core.stats import LoaderStatistics
from penstock.observe.live import live_text, panel
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.record.finding import Finding
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.timeline import TimelinePoint
from penstock.observe.report.write_html import render_html

pytestmark = pytest.mark.usefixtures("preloaded_python")

OSC = "\x1b]52;c;ZXZpbA==\x07\x1b]8;;http:evil\x07"
NAMES = [f"a{OSC}", "a\rpenstock: all is well", "a\u202efdp", "a\x9b31m"]


def controls(text: str) -> set[str]:
    """Return the characters of a text that are neither letters, signs nor spaces."""
    return {one for one in text if not one.isprintable() and not one.isspace()} | ({"\r"} & {*text})


@pytest.mark.parametrize("name", NAMES)
def test_inspect_and_convert_write_out_the_names_of_files(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.jsonl").write_bytes(b'{"x": 1}\n{"\x7fx": "\xc2\x9b31m"}\n')
    (tmp_path / f"{name}.broken.jsonl").write_bytes(b'{"x": 1}\n{"x":\n')
    runs = [
        penstock(tmp_path, "inspect", f"{name}.jsonl"),
        penstock(tmp_path, "inspect", f"{name}.of.no.format"),
        penstock(tmp_path, "convert", "--workers", "0", f"{name}.jsonl", f"{name}.out.jsonl"),
        penstock(tmp_path, "convert", "--workers", "0", f"{name}.broken.jsonl", f"{name}.2.jsonl"),
        penstock(tmp_path, "convert", f"{name}.jsonl", "there", "--option", name),
        penstock(tmp_path, "inspect", f"{name}.jsonl", f"--{name}"),
        penstock(tmp_path, "report", f"{name}.json"),
        penstock(tmp_path, f"insp{name}"),
    ]
    for run in runs:
        assert run.stdout + run.stderr != ""
        assert controls(run.stdout + run.stderr) == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_report_of_a_run_writes_out_what_the_program_was_named_and_given(tmp_path: Path, name: str) -> None:
    program = script(tmp_path, "import sys; sys.exit(3)", f"{name}.py")
    run = penstock(tmp_path, "run", program.name, f"--{name}")
    assert "exit code 3" in run.stderr
    assert controls(run.stderr) == set()
    again = penstock(tmp_path, "report")
    assert controls(again.stdout + again.stderr) == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_panel_and_the_page_write_out_the_names_of_loaders(name: str) -> None:
    now = TimelinePoint(at_s=9)
    snapshot = LiveSnapshot(pid=1, now=now, loader=name, made_at=name, epoch=2, batch=3, length=8, command=(name,))
    for rows in (1, panel.ROWS):
        drawn = "".join(panel.render(snapshot, columns=200, rows=rows, colours=False))
        assert controls(drawn) == set()
    assert controls(live_text.progress_line(snapshot)) == set()
    loader = LoaderRecord(name=name, made_at=name, settings={"sampler": name}, statistics=LoaderStatistics())
    finding = Finding(name="x", cause=name, evidence=name, remedy=name)
    record = RunRecord(command=(name,), started="", wall_s=1.0, error=name, loaders=(loader,), findings=(finding,))
    assert controls(render_html(record)) == set()
