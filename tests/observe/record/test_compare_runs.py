"""Two runs side by side: the figures, and what makes them not comparable."""

from __future__ import annotations

import dataclasses

import made_runs

from penstock.core.stats import IndexDigest, StageTimes
from penstock.observe.record import comparison_text
from penstock.observe.record.compare_digests import compare_ranks
from penstock.observe.record.compare_runs import Difference, compare_runs
from penstock.observe.record.run_summary import summarize_run
from penstock.observe.report import text_report


def _run(*, samples_factor: int = 1, wait_s: float = 5.0, **settings: object):
    one = made_runs.loader(
        "Images", 10 * samples_factor, StageTimes(step_s=5.0, wait_s=wait_s, fetch_s=8.0), **settings
    )
    return dataclasses.replace(made_runs.empty(), command=("train.py",), loaders=(one,))


def test_a_run_is_the_same_as_itself() -> None:
    run = made_runs.ordinary()
    comparison = compare_runs(run, run, "again.json")
    assert (comparison.settings, comparison.caveats) == ((), ())
    assert "No significant difference in throughput (1.00×) to again.json" in comparison_text.render(
        run, comparison, "run.json"
    )


def test_a_faster_run_is_said_to_be_so_with_the_figures_of_both() -> None:
    text = comparison_text.render(
        _run(wait_s=0.0), compare_runs(_run(wait_s=0.0), _run(wait_s=5.0), "old.json"), "new.json"
    )
    assert "2.00× the throughput of old.json; this run waited for data 0 % of the time against 50 %" in text
    (line,) = (line for line in text.splitlines() if "next batch not ready, per batch" in line)
    assert line.split()[-5:] == ["0", "s", "500", "ms", "0.00×"]


def test_settings_that_differ_are_named_with_both_values() -> None:
    comparison = compare_runs(_run(num_workers=2), _run(num_workers=8), "other")
    assert comparison.settings == (Difference(setting="num_workers of Images", run="2", reference="8"),)


def test_what_makes_two_runs_not_comparable_is_said() -> None:
    here = dataclasses.replace(
        _run(),
        cpus=4,
        machine={"processor": "a", "memory_nbytes": 1 << 30},
        versions={"torch": "2.13", "python": "3.11"},
    )
    there = dataclasses.replace(
        _run(samples_factor=2),
        command=("other.py",),
        exit_code=1,
        error="ValueError: x",
        cpus=8,
        machine={"processor": "b", "memory_nbytes": 2 << 30},
        versions={"torch": "2.9", "python": "3.11"},
    )
    assert compare_runs(here, there, "there").caveats == (
        "different commands: train.py and other.py",
        "the other run ended early: ValueError: x",
        "different numbers of samples: 640 and 1 280",
        "different numbers of batches: 10 and 20",
        "different numbers of usable cores: 4 and 8",
        "different machines: processor a and b",
        "different machines: memory 1.0 GiB and 2.0 GiB",
        "different versions: torch 2.13 and 2.9",
    )


def test_a_run_without_samples_compares_to_nothing() -> None:
    run = summarize_run(made_runs.empty(), "this run")
    comparison = compare_runs(made_runs.empty(), made_runs.ordinary(), "other")
    assert comparison_text.verdict(run, comparison) == "There is nothing to compare: this run loaded no samples."
    assert all(row.ratio in ("0.00×", "–") for row in comparison_text.rows(run, comparison.reference))


def _digests(*digests: str, **settings: object):
    """Return a run with digests after 1, 2 and 4 batches of two epochs, which end after 5."""
    places = [(epoch, batches) for epoch in range(2) for batches in (1, 2, 4, 5)]
    found = [
        IndexDigest(epoch=epoch, batches=batches, digest=digest, is_end=batches == 5)
        for (epoch, batches), digest in zip(places, digests, strict=False)
    ]
    run = _run(**settings)
    statistics = dataclasses.replace(run.loaders[0].statistics, index_digests=tuple(found))
    return dataclasses.replace(run, loaders=(dataclasses.replace(run.loaders[0], statistics=statistics, rank=1),))


def test_where_the_orders_of_two_runs_part_is_said() -> None:
    run = _digests(*"abcdefgh")
    for other, where in (
        ("Abcdefgh", "first in batch 1 of epoch 0 (digests a and A)"),
        ("abcDEFGH", "first in batch 5 of epoch 0 (digests d and D)"),
        ("abcdefGH", "first in batches 3 to 4 of epoch 1 (digests g and G)"),
    ):
        comparison = compare_runs(run, _digests(*other), "other")
        (caveat,) = comparison.caveats
        assert caveat == f"Images of rank 1 was handed other indices, or in another order, {where}"
        assert caveat in comparison_text.render(run, comparison, "run")
        assert comparison_text.as_json(run, comparison, "run")["orders"] == {"parted": (caveat,), "equal": ()}


def test_equal_orders_are_said_to_be_equal_as_far_as_both_runs_went() -> None:
    run, shorter = _digests(*"abcdefgh"), _digests(*"abcdef")
    text = comparison_text.render(run, compare_runs(run, shorter, "other"), "run")
    assert "Images of rank 1 was handed the same indices in the same order, up to batch 2 of epoch 1" in text
    # With other sizes of batches, what follows the same number of batches is not the same number of indices.
    larger = _digests(*"xyzd", batch_size=128)
    comparison = compare_runs(run, larger, "other")
    assert comparison.orders.parted == ()
    assert comparison.orders.equal[0].endswith("up to the end of epoch 0")


def _ranks(*each: tuple[tuple[int, int] | None, str]):
    """Return a run whose ranks have a share of the samples and the digests of a pass."""
    loaders = []
    for rank, (share, digests) in enumerate(each):
        (loader,) = _digests(*digests).loaders
        statistics = dataclasses.replace(loader.statistics, share=share)
        loaders.append(dataclasses.replace(loader, rank=rank, statistics=statistics))
    return dataclasses.replace(_run(), loaders=tuple(loaders))


def test_ranks_that_must_be_handed_the_same_are_compared_and_those_that_must_not() -> None:
    first, second = (0, 2), (1, 2)
    for run, said in (
        (_ranks((first, "abcd"), (second, "efgh")), "2 ranks have 2 shares of the samples, and were handed each other"),
        (
            _ranks((first, "abcd"), (first, "abcd"), (second, "efgh")),
            "ranks with the same share the same indices, and others others",
        ),
        (
            _ranks((first, "abcd"), (first, "abXd"), (second, "efgh")),
            "ranks 0 and 1 must be handed the same indices, and theirs part first in batches 3 to 4 of epoch 0",
        ),
        (
            _ranks((first, "abcd"), (second, "abcd")),
            "ranks 0 and 1 must be handed other indices, and were handed the same (digest d)",
        ),
        (_ranks(((0, 1), "abcd"), ((0, 1), "abcd")), "every rank was handed the same indices, as only ranks of one re"),
    ):
        (text,) = compare_ranks(run.loaders)
        assert text.startswith("Images: ")
        assert said in text
        assert f"  indices: {text}" in text_report.render(run)
    for run in (
        _ranks(((0, 1), "abcd"), ((0, 1), "efgh")),
        _ranks((None, "abcd"), (None, "abcd")),
        _ranks((first, "abcd")),
        _ranks((first, ""), (second, "")),
    ):
        assert compare_ranks(run.loaders) == ()


def test_runs_without_digests_say_nothing_of_their_order() -> None:
    comparison = compare_runs(_run(), _digests(*"abcd"), "other")
    assert (comparison.orders.parted, comparison.orders.equal) == ((), ())
