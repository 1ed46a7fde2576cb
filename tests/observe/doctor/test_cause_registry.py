"""The seam of causes: what every registered cause must be, and a toy cause that is added from outside."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.causes.cause import Cause, cause
from penstock.observe.doctor.causes.cause_registry import CAUSES
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.trial import AS_IS, TimingWindow, Trial
from penstock.observe.record.finding import Finding

_HEALTHY = Measurements(
    name="train:main",
    machine=Machine(cores=4),
    settings=Settings(dataset="D", batch_size=7),
    has_step=True,
    trials=(Trial(name=AS_IS, windows=(TimingWindow(batches=10, wall_s=1.0, wait_s=0.0, step_s=1.0),)),),
)


class FakeCause:
    """A cause that finds what it is given, and counts how often it was asked."""

    def __init__(self, finding: Finding | None, *needs: str) -> None:
        self.name = "fake"
        self.needs = needs
        self.asked = 0
        self._finding = finding

    def find(self, measured: Measurements) -> Finding | None:
        self.asked += 1
        return self._finding


@cause("odd-batch-size")
def odd_batch_size(measured: Measurements) -> Finding | None:
    """A batch size that is odd."""
    size = measured.settings.batch_size
    if size is None or size % 2 == 0:
        return None
    return Finding(
        name="odd-batch-size", cause="The batch size is odd.", evidence=f"batch_size={size}", remedy=f"{size + 1}"
    )


def test_a_toy_cause_is_one_function_and_one_entry_in_the_list() -> None:
    causes: tuple[Cause, ...] = (*CAUSES, odd_batch_size)
    diagnosis = diagnose(_HEALTHY, causes)
    assert [finding.name for finding in diagnosis.findings] == ["odd-batch-size"]
    assert (diagnosis.verdict.name, diagnosis.verdict.remedy) == ("compute-bound", "8")
    assert diagnose(replace(_HEALTHY, settings=Settings(dataset="D", batch_size=8)), causes).findings == ()


def test_a_cause_is_not_asked_while_a_measurement_that_it_needs_is_missing() -> None:
    fake = FakeCause(None, "transport_s")
    diagnose(_HEALTHY, [fake])
    assert fake.asked == 0
    diagnose(replace(_HEALTHY, transport_s=0.1), [fake])
    assert fake.asked == 1


def test_of_two_findings_with_one_name_the_first_is_kept() -> None:
    first, second = (Finding(name="same", cause=text, evidence="", remedy="r") for text in ("first", "second"))
    assert diagnose(_HEALTHY, [FakeCause(first), FakeCause(second)]).findings == (first,)


@pytest.mark.parametrize("registered", CAUSES, ids=lambda one: one.name)
def test_a_registered_cause_needs_measurements_that_exist_and_finds_nothing_in_a_healthy_loop(
    registered: Cause,
) -> None:
    assert set(registered.needs) <= {field.name for field in fields(Measurements)} | {"as_is"}
    assert registered.name == registered.name.lower()
    if not any(getattr(_HEALTHY, need) is None for need in registered.needs):
        assert registered.find(_HEALTHY) is None
