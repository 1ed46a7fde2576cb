"""How many CPU machines a number of GPUs needs, and what the bottleneck is: `python -m benchmarks.scale --gpus 64 ...`.

Formulas only, in samples per second. Every **stage** of a sample's path has a capacity. The steps of the GPUs define
how many samples are wanted; the stages of the trainers and the store limit how many can be received; the number of CPU
machines follows from the smaller of the two. All figures are assumptions until you replace them (`--help` lists them).

    store ──▶ CPU machine: link in, cores, link out ──▶ trainer: link, copy into a slot, memory, loop ──▶ link, GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import ceil, inf

from rich.console import Console
from rich.table import Table

from penstock.core.units import size_text

GIGABIT = 1e9 / 8
"""Bytes."""

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one GPU. Sizes in bytes, times in seconds."""

    sample_s: float = 0.012
    """One core's time to make a sample: read, unpack, decode, augment."""

    sample_nbytes: int = 600_000
    """A sample as it travels and lies in a slot."""

    stored_nbytes: int = 110_000
    """A sample as the store keeps it."""

    batch_size: int = 256
    """For one GPU."""

    step_s: float = 0.18
    """One GPU's step for such a batch, when its data is there."""

    host_s: float = 0.0
    """The part of the step in which the loop's thread is busy: 0 where it only starts kernels and runs ahead."""

    def __post_init__(self) -> None:
        for name in ("sample_s", "sample_nbytes", "stored_nbytes", "batch_size", "step_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, it is {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines. Defaults are assumptions: replace them by your own figures."""

    gpus_per_trainer: int = 8
    cores_per_machine: int = 64
    """Of a CPU machine."""

    fill: float = 0.9
    """How busy a CPU machine's cores and links may be: what is left keeps uneven samples from holding up a batch."""

    gbit: float = 25.0
    """A CPU machine's link, each way."""

    trainer_gbit: float = 100.0
    """What a trainer's link has for data."""

    latency_s: float = 0.0005
    """A round trip between trainer and CPU machine."""

    storage_gbit: float = 400.0
    """What the store gives to all readers together."""

    memory_gb_per_s: float = 200.0
    """A trainer's memory, reads and writes together."""

    memory_passes: float = 4.0
    """How often a byte passes it: the network card writes it, the copy reads and writes it, the GPU's link reads it."""

    device_gb_per_s: float = 25.0
    """From a trainer's memory to one GPU."""

    copy_gb_per_s: float = 5.0
    """Into a slot, by the one thread that each GPU's process has for it."""

    handling_s: float = 0.001
    """The loop's thread, for a batch: giving out work, taking it in."""

    def __post_init__(self) -> None:
        if not 0 < self.fill <= 1:
            raise ValueError(f"fill is a share of a machine's time, more than 0 and at most 1; it is {self.fill}")
        for name in ("gpus_per_trainer", "cores_per_machine", "gbit", "trainer_gbit", "storage_gbit"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, it is {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class PathStage:
    """One stage of a sample's path, for the whole fleet."""

    name: str
    samples_per_s: float
    """Its capacity."""

    given: float
    """The figure that the capacity follows from."""

    unit: str
    less_is_more: bool = False
    """Whether a smaller figure carries more: a time."""

    def share(self, samples_per_s: float) -> float:
        """Return how much of the stage `samples_per_s` take: 1 is all of it."""
        return samples_per_s / self.samples_per_s

    def enough(self, samples_per_s: float) -> float:
        """Return the figure that would just carry `samples_per_s`, all else being equal."""
        return self.given / self.share(samples_per_s) if self.less_is_more else self.given * self.share(samples_per_s)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a number of GPUs needs."""

    gpus: int
    trainers: int
    wanted: float
    """Samples per second that the steps use when they never wait."""

    fed: float
    """Samples per second that they can be given: `wanted`, or the capacity of the bottleneck."""

    machines: int
    """CPU machines for `fed`."""

    machines_wanted: int
    """CPU machines for `wanted`, were all else wide enough."""

    machines_for: str
    """What determines their number: "cores", "link out" or "link in"."""

    cores: float
    """Cores that work, on average, for `fed`."""

    stages: list[PathStage]
    """What trainers and store can carry, bottleneck first."""

    batches_in_flight: int
    """For each GPU, from sending its work to receiving it, when one core makes a whole batch."""

    slots_nbytes: int
    """Memory of one trainer that those batches, and the one in use, take."""

    @property
    def busy_share(self) -> float:
        """How much of the time the GPUs compute."""
        return self.fed / self.wanted

    @property
    def next_stage(self) -> PathStage:
        """The bottleneck, or the stage that is the next one when steps get faster."""
        return self.stages[0]


def plan(work: Work, machines: Machines, gpus: int) -> Plan:
    """Return what `gpus` GPUs need.

    By hand: 8 GPUs with 256 samples in 180 ms want 8 * 256 / 0.180 = 11 378 samples a second. At 12 ms of a core for
    each that is 136.5 cores; a machine of 64, 90 % full, has 57.6 of them: 2.37 machines. 600 000 bytes each are
    6.83 GB/s, or 54.6 Gbit/s: over half of a trainer's 100, and 2.43 machines with 90 % of 25 Gbit/s. So it is three,
    for their links.

    >>> work = Work(sample_s=0.012, sample_nbytes=600_000, stored_nbytes=100_000, batch_size=256, step_s=0.18)
    >>> found = plan(work, Machines(), gpus=8)
    >>> found.machines, found.machines_for, round(found.cores, 1), found.next_stage.name
    (3, 'link out', 136.5, "trainer's link")
    >>> round(found.next_stage.enough(found.wanted), 1), found.next_stage.unit
    (54.6, 'Gbit/s')
    """
    if gpus < 1:
        raise ValueError(f"a plan needs at least 1 GPU, gpus is {gpus}")
    wanted = gpus * work.batch_size / work.step_s
    stages = sorted(_stages(work, machines, gpus), key=lambda stage: stage.samples_per_s)
    fed = min(wanted, stages[0].samples_per_s)
    each = _machine_capacity(work, machines)
    machines_for = min(each, key=lambda part: each[part])
    machine = each[machines_for] * (1 + 1e-9)  # a rounding error adds no machine
    in_flight = ceil(_batches_in_flight(work, machines, fed / gpus / work.batch_size))
    in_trainer = min(gpus, machines.gpus_per_trainer)
    return Plan(
        gpus=gpus,
        trainers=ceil(gpus / machines.gpus_per_trainer),
        wanted=wanted,
        fed=fed,
        machines=ceil(fed / machine),
        machines_wanted=ceil(wanted / machine),
        machines_for=machines_for,
        cores=fed * work.sample_s,
        stages=stages,
        batches_in_flight=in_flight,
        slots_nbytes=in_trainer * (in_flight + 1) * work.batch_size * work.sample_nbytes,
    )


def _stages(work: Work, machines: Machines, gpus: int) -> Iterable[PathStage]:
    """Yield what the trainers of `gpus` GPUs, and the store, can carry."""
    nbytes = work.sample_nbytes
    shared = gpus / min(gpus, machines.gpus_per_trainer)  # a full trainer is the narrowest; all steps wait for it
    link = machines.trainer_gbit
    yield PathStage(name="trainer's link", samples_per_s=shared * link * GIGABIT / nbytes, given=link, unit="Gbit/s")
    memory = machines.memory_gb_per_s
    carried = shared * memory * GB / machines.memory_passes / nbytes
    yield PathStage(name="trainer's memory", samples_per_s=carried, given=memory, unit="GB/s")
    copy = machines.copy_gb_per_s
    yield PathStage(name="copy into a slot", samples_per_s=gpus * copy * GB / nbytes, given=copy, unit="GB/s")
    loop_s = work.host_s + machines.handling_s
    handled = gpus * work.batch_size / loop_s if loop_s else inf
    yield PathStage(name="loop's thread", samples_per_s=handled, given=loop_s * 1e3, unit="ms", less_is_more=True)
    device = machines.device_gb_per_s
    yield PathStage(name="link to the GPU", samples_per_s=gpus * device * GB / nbytes, given=device, unit="GB/s")
    store = machines.storage_gbit
    yield PathStage(name="store", samples_per_s=store * GIGABIT / work.stored_nbytes, given=store, unit="Gbit/s")


def _machine_capacity(work: Work, machines: Machines) -> dict[str, float]:
    """Return what each part of one CPU machine carries, as full as it may be."""
    link = machines.fill * machines.gbit * GIGABIT
    return {
        "cores": machines.fill * machines.cores_per_machine / work.sample_s,
        "link out": link / work.sample_nbytes,
        "link in": link / work.stored_nbytes,
    }


def _batches_in_flight(work: Work, machines: Machines, batches_per_s: float) -> float:
    """Return how many batches one GPU has in flight, by Little's law: their rate times what each of them takes."""
    nbytes = work.batch_size * work.sample_nbytes
    sent_s = nbytes / (machines.gbit * GIGABIT) + nbytes / (machines.trainer_gbit * GIGABIT)
    return batches_per_s * (work.batch_size * work.sample_s + machines.latency_s + sent_s)


def main() -> None:
    """Print a plan for each number of GPUs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", default=[8, 64, 1024])
    for figures in (Work(), Machines()):
        for field in fields(figures):
            default = getattr(figures, field.name)
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(default), default=default, metavar="X", help=f"{default:,}")
    asked = vars(parser.parse_args())
    try:
        work, machines = (
            kind(**{field.name: asked[field.name] for field in fields(kind)}) for kind in (Work, Machines)
        )
        Console().print(_table([plan(work, machines, gpus) for gpus in asked["gpus"]]))
    except ValueError as error:
        parser.error(str(error))


def _table(plans: list[Plan]) -> Table:
    table = Table("", *(f"{found.gpus:,} GPUs" for found in plans))
    table.add_row("samples/s wanted", *(f"{found.wanted:,.0f}" for found in plans))
    table.add_row("samples/s fed", *(f"{found.fed:,.0f}" for found in plans))
    table.add_row("GPUs compute", *(f"{found.busy_share:.0%}" for found in plans))
    table.add_row("CPU machines", *(f"{found.machines:,}, for their {found.machines_for}" for found in plans))
    table.add_row("CPU machines, for all that is wanted", *(f"{found.machines_wanted:,}" for found in plans))
    table.add_row("slots of a trainer", *(size_text(found.slots_nbytes) for found in plans), end_section=True)
    for stage in plans[-1].stages:
        used = []
        for found in plans:
            same = next(one for one in found.stages if one.name == stage.name)
            used.append(f"{same.share(found.wanted):.1%} (enough: {same.enough(found.wanted):.3g} {same.unit})")
        table.add_row(f"{stage.name}, {stage.given:.3g} {stage.unit}: used", *used)
    return table


if __name__ == "__main__":
    main()
