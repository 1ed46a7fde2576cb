"""Processors: fewer than the loop believes, or more threads than there are."""

from __future__ import annotations

from penstock.observe.diagnose.reading import slowed, takes_cores
from penstock.observe.examination import Examination
from penstock.observe.finding import Finding
from penstock.observe.trial import FEWER_WORKERS, FREE

_SLOWED = 1.5
_AS_WELL = 0.85


def cpu_quota(found: Examination) -> Finding | None:
    """The control group allows fewer processors than the machine shows, and the loop asks for more."""
    machine, own = found.machine, found.settings
    quota = machine.quota_cores
    if quota is None or quota >= machine.cores:
        return None
    wanted = max(own.num_workers + 1, 1 if machine.accelerator else machine.intra_op_threads)
    if wanted <= quota and machine.throttled_s <= 0.05 * found.wall_s:
        return None
    fits = max(1, int(quota) - 1)
    held = f"; it was held back {machine.throttled_s:.1f} s of {found.wall_s:.0f} s" if machine.throttled_s else ""
    return Finding(
        name="cpu-quota",
        cause="The container may use fewer processors than it sees, and the loop asks for more.",
        evidence=(
            f"cpu.max allows {quota:.1f} of the {machine.cores} cores that os.cpu_count() shows; "
            f"{own.num_workers} workers "
            f"beside the training process, torch.get_num_threads() is {machine.intra_op_threads}{held}"
        ),
        remedy=(
            f"num_workers={fits if own.num_workers else 0} and torch.set_num_threads({max(1, int(quota))}); or "
            f"raise the "
            f"limit (docker run --cpus={wanted}, resources.limits.cpu in Kubernetes)"
        ),
    )


def threads_in_workers(found: Examination) -> Finding | None:
    """Each worker computes with several threads."""
    look = found.workers
    # Python's own threads share a lock: several of them are busy by turns, and take one core together.
    if look is None or look.busy_threads < 2.5 or (look.cores < 1.3 and look.busy_threads < 4):
        return None
    wanted = look.busy_threads * found.settings.num_workers
    if wanted <= found.machine.usable_cores:
        return None
    return Finding(
        name="threads-in-workers",
        cause="Each worker computes with several threads, more together than there are cores.",
        evidence=(
            f"{look.busy_threads:.1f} busy threads ({look.cores:.1f} cores) in each of "
            f"{found.settings.num_workers} workers, on "
            f"{found.machine.usable_cores:g} cores (loaded there: {', '.join(look.libraries) or 'nothing known'})"
        ),
        remedy=(
            "worker_init_fn=lambda _: torch.set_num_threads(1), and no set_num_threads in the dataset; for OpenMP and "
            f"OpenBLAS, OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 before Python starts{_opencv(look.libraries)}"
        ),
    )


def too_many_workers(found: Examination) -> Finding | None:
    """There are more workers than cores, and fewer do as well."""
    own, usable = found.settings, found.machine.usable_cores
    if not own.start_method or own.num_workers <= usable:
        return None
    trial, gain = found.trial(FEWER_WORKERS), found.gain_of(FEWER_WORKERS)
    fewer = max(1, round(1.5 * usable))
    if not _hides(found, fewer) and (gain is None or gain.median < _AS_WELL):
        return None
    fits = trial.line if trial is not None else f"num_workers={fewer}"
    tried = f"; with {fits} it is {gain.median:.2f} times as fast" if gain is not None else ""
    return Finding(
        name="too-many-workers",
        cause="There are more workers than cores, and fewer do as well: they take turns, and each holds memory.",
        evidence=f"{own.num_workers} workers on {usable:g} cores{tried}",
        remedy=fits,
        gain=gain.median if gain is not None and gain.is_clear else None,
        is_measured=gain is not None and gain.is_clear,
    )


def _hides(found: Examination, workers: int) -> bool:
    """Say whether so many workers, by what their work was measured to take, still hide it behind the step."""
    samples, free = found.samples, found.trial(FREE)
    if samples is None or free is None or free.batch_s is None:
        return False
    at_once = min(float(workers), found.machine.usable_cores)
    return (samples.fetch_s + samples.collate_s) / at_once < 0.7 * free.batch_s


def cpu_contention(found: Examination) -> Finding | None:
    """The step takes much longer beside its loader."""
    times, own = slowed(found), found.settings
    if times is None or times < _SLOWED or not takes_cores(found):
        return None
    left = max(1, round(found.machine.usable_cores) - own.num_workers)
    return Finding(
        name="cpu-contention",
        cause="The step computes on the cores that the workers use, and both lose.",
        evidence=(
            f"beside its loader the step takes {times:.1f} times as long as with loading free; "
            f"torch.get_num_threads() is {found.machine.intra_op_threads}, with {own.num_workers} workers on "
            f"{found.machine.usable_cores:g} cores"
        ),
        remedy=f"torch.set_num_threads({left}) in the training process, or fewer workers",
    )


def _opencv(libraries: tuple[str, ...]) -> str:
    return "; cv2.setNumThreads(0) in the dataset" if "opencv" in libraries else ""
