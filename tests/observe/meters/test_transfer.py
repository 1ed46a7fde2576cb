"""The transfer report shows what was measured, and the advice that follows from it."""

from __future__ import annotations

import json

import pytest
import torch

from penstock import Sim
from penstock.cli import main
from penstock.device import device_of
from penstock.observe.meters.transfer import measure_transfer
from penstock.observe.meters.transfer_report import CopyTiming, TransferReport


def copy(source: str, *, call_ms: float, total_ms: float, non_blocking: bool = False) -> CopyTiming:
    return CopyTiming(source=source, non_blocking=non_blocking, call_s=call_ms / 1e3, total_s=total_ms / 1e3)


HOST = [copy("fresh memory", call_ms=8, total_ms=8), copy("slot", call_ms=4, total_ms=4)]


def report(*, slot_ms: float, held_up_ms: float, ahead_ms: float) -> TransferReport:
    return TransferReport(
        device="cuda:0",
        nbytes=1 << 20,
        host_copies=HOST,
        device_copies=[
            copy("pageable memory", call_ms=6, total_ms=6),
            copy("pageable memory", call_ms=5.9, total_ms=6, non_blocking=True),
            copy("pinned on the way", call_ms=9, total_ms=9),
            copy("slot", call_ms=slot_ms, total_ms=slot_ms),
            copy("slot", call_ms=held_up_ms, total_ms=slot_ms, non_blocking=True),
        ],
        step_s={"alone": 2e-3, "direct": 4e-3, "ahead": ahead_ms / 1e3},
    )


def test_what_pays_is_said_with_its_reason() -> None:
    words = " ".join(report(slot_ms=2, held_up_ms=0.1, ahead_ms=2.1).advice())
    assert "pin_memory=True pays: a copy from a pinned slot is 3.0 times as fast" in words
    assert "`batch.pin_memory().to(...)`) costs more than it gains: 9.00 ms against 6.00 ms" in words
    assert "non_blocking=True pays: from a pinned slot the caller gets 95% of the copy's time back" in words
    assert "device= pays" in words
    assert "a copy into a slot takes 0.50 of the time of a copy into fresh memory" in words


def test_what_does_not_pay_is_said_as_plainly() -> None:
    words = " ".join(report(slot_ms=6, held_up_ms=5, ahead_ms=4).advice())
    assert "pin_memory=True does not pay" in words
    assert "non_blocking=True does not pay" in words
    assert "device= does not pay" in words


def test_without_an_accelerator_host_copies_are_measured_and_that_is_said() -> None:
    found = measure_transfer((16, 1024), torch.float32, device_of("cpu"))
    assert found.device_copies == []
    assert [one.source for one in found.host_copies] == ["fresh memory", "slot"]
    assert "only host copies were measured" in found.render()


def test_on_the_simulated_device_a_pinned_slot_frees_the_caller() -> None:
    found = measure_transfer((1 << 18,), torch.uint8, Sim(bandwidth=2e7))
    started = found.device_copies[-1]
    assert started.source == "slot"
    assert started.call_s < started.total_s / 2
    assert "non_blocking=True pays" in found.render()


def test_the_command_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transfer", "--shape", "4,256", "--device", "sim"]) == 0
    assert "to sim" in capsys.readouterr().out
    assert main(["doctor", "--transfer", "--shape", "4,256", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nbytes"] == 4096


@pytest.mark.parametrize("words", [["--shape", "4,x"], ["--shape", "0"], ["--dtype", "floaty"], ["--device", "gpu9"]])
def test_what_cannot_be_measured_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transfer", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
