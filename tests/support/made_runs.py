"""Synthetic run records: ordinary, extreme and hostile ones, for tests of what shows or exports a run."""

from __future__ import annotations

import math
import random

from penstock.core.stats import LoaderStatistics, RingCounts, StageTimes
from penstock.observe.meters.device_meter import DeviceMemory
from penstock.observe.meters.host_memory import HostMemory
from penstock.observe.record.finding import Finding
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.timeline import TimelinePoint

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\"'&amp;<b>%{y}"
"""Text that must be shown as it is, and never be run."""


def ordinary(*, points: int = 240, wall_s: float = 120.0, device: bool = True, stall: float = 0.4) -> RunRecord:
    """A training run on a GPU whose stall grows."""
    rng = random.Random(0)
    timeline, stages, batches = [], [0.0] * 5, 0
    period_s = wall_s / points
    for k in range(points):
        in_validation = k % 60 >= 54
        wait = 0.0 if k < 4 else period_s * min(0.9, stall * (0.4 + 1.2 * k / points) * (0.8 + 0.4 * rng.random()))
        step = 0.02 * period_s if k < 4 or in_validation else period_s * 0.97 - wait
        if in_validation:
            wait = 0.0
        batches += 0 if k < 4 else max(0, round(step / 0.05))
        for stage, seconds in enumerate((wait * 3.2 + 0.4 * step, wait * 0.5 + 0.1, 0.02 * period_s, wait, step)):
            stages[stage] += 0.0 if k < 4 else seconds
        timeline.append(
            TimelinePoint(
                at_s=(k + 1) * period_s,
                batches=batches,
                samples=batches * 64,
                nbytes=batches << 20,
                stages=StageTimes(
                    fetch_s=stages[0], collate_s=stages[1], transport_s=stages[2], wait_s=stages[3], step_s=stages[4]
                ),
                loading_s=stages[3] + stages[2],
                ready=0 if k < 4 else max(0, round(6 - 12 * wait / period_s + rng.random())),
                held=0 if k < 4 else 2,
                workers=0 if k < 4 else 4,
                slots_nbytes=0 if k < 4 else 320 << 20,
                host_nbytes=None if k % 4 else int((1.2 + 0.9 * min(1, k / 20)) * (1 << 30)) + (k << 19),
                device_nbytes=int((3.1 + 0.2 * math.sin(k / 3)) * (1 << 30)) if device and k >= 4 else None,
                device_peak_nbytes=int((3.6 if k < 60 else 3.8) * (1 << 30)) if device and k >= 4 else None,
                device_reserved_nbytes=int(4.4 * (1 << 30)) if device and k >= 4 else None,
                device_utilization=(step / period_s * 0.96 if k >= 4 else 0.0) if device else None,
            )
        )
    last = timeline[-1]
    return RunRecord(
        command=("train.py", "--data", "/data/imagenet", "--epochs", "3"),
        started="2026-11-21T09:30:00+00:00",
        wall_s=wall_s,
        versions={"penstock": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
        cpus=8,
        machine={"processor": "AMD EPYC 7B13", "cores": 8, "memory_nbytes": 64 << 30, "system": "Linux 6.1"},
        memory=HostMemory(peak_pss_nbytes=3 << 30, peak_rss_nbytes=2 << 30, processes=6),
        device_memory=_device_memory() if device else None,
        loaders=(
            loader("ImageFolder", last.batches, last.stages),
            loader(
                "ImageFolder #2", 40, StageTimes(fetch_s=2.0, collate_s=0.4, transport_s=0.1, wait_s=0.1, step_s=3.0)
            ),
        ),
        timeline=tuple(timeline),
        findings=(
            Finding(
                name="decode-bound",
                cause="Decoding in the workers is the bottleneck.",
                evidence="4 workers were busy 97 % of the time, 86 % of it in PIL's decoder; the step waited 41 %.",
                remedy="DataLoader(dataset, batch_size=64, num_workers=7)",
                gain=1.45,
                is_measured=True,
            ),
            Finding(
                name="decodes-too-large",
                cause="Images are decoded at full size and shrunk afterwards.",
                evidence="Files hold 500×375 pixels on average, samples 224×224.",
                remedy='image.draft("RGB", (256, 256))  # right after Image.open',
                gain=1.2,
            ),
        ),
    )


def _device_memory() -> DeviceMemory:
    gib = 1 << 30
    return DeviceMemory(
        peak_nbytes=int(3.8 * gib),
        peak_reserved_nbytes=int(4.4 * gib),
        total_nbytes=8 * gib,
        retries=2,
        weights_nbytes=gib // 2,
        gradients_nbytes=gib // 2,
        optimizer_nbytes=gib,
    )


def loader(name: str, batches: int, stages: StageTimes, **settings: object) -> LoaderRecord:
    """A loader with process workers."""
    return LoaderRecord(
        name=name,
        settings={"batch_size": 64, "num_workers": 4, "prefetch_factor": 2, "pin_memory": True, **settings},
        statistics=LoaderStatistics(
            epochs=1,
            batches=batches,
            samples=batches * 64,
            nbytes=batches << 20,
            first_batch_s=0.054,
            stages=stages,
            worker_type="process",
            start_method="fork",
            workers=4,
            dispatch="demand",
            dispatch_reason="samples do not tell their worker",
            ring=RingCounts(nbytes=320 << 20),
            length=batches,
            pinning="5 slots, 320 MiB; copies of this size are 2.1 times as fast from pinned memory",
        ),
    )


def inline() -> RunRecord:
    """A run without workers, on the CPU."""
    stages = StageTimes(fetch_s=6.0, collate_s=0.5, transport_s=0.1, step_s=4.0)
    points = tuple(
        TimelinePoint(
            at_s=k + 1.0,
            batches=10 * (k + 1),
            samples=640 * (k + 1),
            stages=StageTimes(fetch_s=0.5 * (k + 1), collate_s=0.04 * (k + 1), step_s=0.33 * (k + 1)),
            loading_s=0.55 * (k + 1),
            held=1,
            host_nbytes=400 << 20,
        )
        for k in range(12)
    )
    one = LoaderRecord(
        name="TensorDataset",
        settings={"batch_size": 64, "num_workers": 0},
        statistics=LoaderStatistics(batches=120, samples=7680, stages=stages, first_batch_s=0.001, epochs=1),
    )
    return RunRecord(
        command=("train.py",),
        started="2026-11-21T09:30:00+00:00",
        wall_s=12.0,
        cpus=4,
        versions={"penstock": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
        memory=HostMemory(peak_pss_nbytes=400 << 20, peak_rss_nbytes=400 << 20),
        loaders=(one,),
        timeline=points,
    )


def empty() -> RunRecord:
    """A program without a loader."""
    return RunRecord(command=("hello.py",), started="2026-11-21T09:30:00+00:00", wall_s=0.2)


def failed() -> RunRecord:
    """A run that raised before its timeline had begun."""
    return RunRecord(
        command=("train.py",),
        started="2026-11-21T09:30:00+00:00",
        wall_s=1.5,
        exit_code=1,
        error="RuntimeError: CUDA error: device-side assert triggered " + "x" * 3000,
        loaders=(loader("Images", 2, StageTimes(wait_s=1.0, fetch_s=2.0, step_s=0.2)),),
        timeline=(TimelinePoint(at_s=0.5, batches=1, samples=64),),
    )


def hostile() -> RunRecord:
    """A run whose every text is HTML, with names longer than any screen, and hundreds of loaders."""
    many = tuple(
        loader(f"{HOSTILE}{k}{'W' * 200}", k + 1, StageTimes(wait_s=1.0, fetch_s=1.0, step_s=1.0), batch_size=k)
        for k in range(300)
    )
    base = ordinary(points=1200, wall_s=40_000.0)
    return RunRecord(
        command=(HOSTILE, "x" * 3000),
        started=HOSTILE,
        wall_s=40_000.0,
        exit_code=1,
        error=HOSTILE,
        versions={HOSTILE: HOSTILE},
        machine={HOSTILE: HOSTILE},
        loaders=many,
        timeline=base.timeline,
        findings=(Finding(name=HOSTILE, cause=HOSTILE, evidence=HOSTILE, remedy=HOSTILE + "\n" + "y" * 900, gain=2.0),),
    )
