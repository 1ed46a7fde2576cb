"""A run survives being written and read; what is not a run is refused with what to do."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_runs
import pytest

from penstock.core.errors import OptionError
from penstock.core.stats import IndexDigest, LoaderStatistics, RingCounts, StageTimes
from penstock.observe.meters.host_memory import HostMemory
from penstock.observe.record import run_record
from penstock.observe.record.finding import Finding
from penstock.observe.record.timeline import TimelinePoint
from penstock.observe.report import text_report
from penstock.observe.report.headline import headline
from penstock.observe.report.write_html import render_html

RUN = run_record.RunRecord(
    command=("train.py", "--lr", "1"),
    started="2026-01-01T00:00:00+00:00",
    wall_s=12.5,
    exit_code=1,
    error="ValueError: x",
    versions={"penstock": "0", "python": "3", "torch": None},
    cpus=4,
    memory=HostMemory(peak_pss_nbytes=1 << 30, peak_rss_nbytes=1 << 29, processes=3),
    loaders=(
        run_record.LoaderRecord(
            name="Images",
            settings={"batch_size": 4},
            statistics=LoaderStatistics(
                batches=2,
                samples=8,
                stages=StageTimes(wait_s=1.0, step_s=3.0),
                worker_type="process",
                workers=2,
                restarts=1,
                quarantined=(7,),
                skipped=2,
                skipped_indices=(1, 2),
                ring=RingCounts(copied_out=1),
                index_digests=(IndexDigest(epoch=0, batches=2, digest="0" * 16, is_end=True),),
            ),
        ),
    ),
    timeline=(TimelinePoint(at_s=0.5, batches=1, samples=4, stages=StageTimes(wait_s=0.5)),),
    findings=(Finding(name="decode-bound", cause="c", evidence="e", remedy="r", gain=1.5, is_measured=True),),
)


def test_what_a_record_says_of_loaders_and_findings_shows_no_secret() -> None:
    secret = "s3://KEY:SECRET@bucket/a"
    loader = replace(
        RUN.loaders[0], name=secret, made_at=secret, fallback_reason=secret, settings={"dataset": [secret]}
    )
    found = Finding(name="cause", cause=secret, evidence=secret, remedy=secret, loader=secret)
    assert "SECRET" not in repr((loader, found))
    assert loader.settings == {"dataset": ["s3://bucket/a"]}


def test_a_saved_run_reads_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run_record.save(RUN, file)
    assert run_record.load(file) == RUN
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_report_names_every_problem() -> None:
    text = text_report.render(RUN)
    for words in (
        "exit code 1",
        "ended by ValueError: x",
        "8 samples in 2 batches, 2 samples/s, waited for data 25 % of the time",
        "workers that died and were replaced: 1",
        "samples that killed their workers: 7",
        "samples skipped: 2 (1, 2)",
        "batches copied out because the program held all slots of the ring: 1",
        "peak host memory: 1.0 GiB (all processes, 3 at most, sampled every 2 s or less often)",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("iterator", "words"),
    [
        ("replaced", "iterator: replaced"),
        ("subclass", "iterator: subclass Cached on penstock's iterator"),
        ("own", "iterator: own iterator of Cached, left alone"),
        ("fallback", "iterator: fell back to torch's, because of x"),
    ],
)
def test_the_report_says_what_iterates_a_loader_and_only_stages_that_are_known(
    iterator: run_record.IteratorKind, words: str
) -> None:
    (loader,) = RUN.loaders
    loader = replace(loader, iterator=iterator, loader_class="Cached", fallback_reason="of x", made_at="train.py:7")
    run = replace(RUN, loaders=(loader,))
    assert run_record.from_json(run_record.as_json(run)) == run
    text = text_report.render(run)
    assert words in text
    assert "Images (train.py:7): 8 samples" in text
    assert ("workers, all together" in text) == (iterator in ("replaced", "subclass"))


def test_a_loader_whose_batches_were_not_counted_is_reported_so() -> None:
    (loader,) = RUN.loaders
    uncounted = replace(loader, iterator="own", loader_class="Cached", statistics=LoaderStatistics())
    text = text_report.render(replace(RUN, loaders=(uncounted,)))
    assert "Images: own iterator of Cached, left alone; its batches were not counted" in text
    never = text_report.render(replace(RUN, loaders=(replace(uncounted, is_iterated=False),)))
    assert "the main process loaded no batch through a DataLoader" in never


def test_a_program_that_an_exception_ended_gets_its_reason_once_and_no_advice_on_loading() -> None:
    slow = made_runs.ordinary(stall=0.9)
    failed = replace(slow, error="ValueError: x", exit_code=1)
    advice = [finding.remedy for finding in slow.findings]
    assert advice
    assert all(words in text_report.render(slow) for words in (*advice, headline(slow).text))
    for text in (text_report.render(failed), html.unescape(render_html(failed))):
        assert text.count("ValueError: x") == 1
        assert not any(words in text for words in (*advice, headline(slow).text))
    assert advice[0] in text_report.render(replace(slow, error="KeyboardInterrupt", exit_code=130))


def test_child_processes_that_were_not_watched_are_counted_or_their_time_is_said() -> None:
    idle = made_runs.empty()
    assert "not watched" not in text_report.render(idle)
    forked = text_report.render(replace(idle, forks_with_loaders=3, children_cpu_s=9.0))
    assert "3 child processes of the program used loaders of their own, which were not watched" in forked
    spawned = text_report.render(replace(idle, children_cpu_s=9.0))
    assert "Child processes of the program, which computed for 9.0 s, were not watched" in spawned
    assert "not watched" not in text_report.render(replace(made_runs.ordinary(), children_cpu_s=9.0))  # its workers


def test_a_run_on_a_busy_machine_says_so() -> None:
    run = replace(made_runs.ordinary(), cpus=2)
    assert "the machine was busy" in text_report.render(replace(run, load=5.25))
    assert "the machine was busy" not in text_report.render(replace(run, load=0.5))


def test_one_loader_on_two_ranks_is_one_line_with_the_sum() -> None:
    (loader,) = RUN.loaders
    text = text_report.render(replace(RUN, loaders=tuple(replace(loader, rank=rank) for rank in (0, 1))))
    assert "Images on 2 ranks: 16 samples in 4 batches" in text
    assert "all loaders" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "Expecting"), ("{}", "not a run of penstock"), (None, "No such file"), ("[1]", "not a run of penstock")],
)
def test_what_is_not_a_run_is_refused_in_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "run.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match=words):
        run_record.load(file)


def test_a_run_with_a_missing_field_is_reported_as_damaged(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run_record.save(RUN, file)
    data: dict[str, Any] = json.loads(file.read_text())
    del data["wall_s"]
    file.write_text(json.dumps(data))
    with pytest.raises(OptionError, match="the run is damaged"):
        run_record.load(file)


def test_a_run_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be written: No such file or directory; pass another --json FILE"):
        run_record.save(RUN, tmp_path / "no" / "run.json")
