"""Causes that lie in the processors: fewer than the loop assumes, or more threads than there are cores."""

from __future__ import annotations

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import (
    OF_SAMPLES,
    loading_matters,
    loading_parts_s,
    oversubscribes_cores,
    step_slowdown,
)
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import FEWER_WORKERS, FREE, NO_WORKERS, ONE_THREAD
from penstock.observe.record.finding import Finding


@cause("cpu-quota")
def cpu_quota(measured: Measurements) -> Finding | None:
    """The cgroup allows fewer processors than the machine shows, and the loop uses more."""
    machine, own = measured.machine, measured.settings
    quota = machine.quota_cores
    if quota is None or quota >= machine.cores:
        return None
    wanted = max(own.num_workers + 1, 1 if machine.accelerator else machine.intra_op_threads)
    if wanted <= quota and machine.throttled_s <= THRESHOLDS.throttled_fraction * measured.wall_s:
        return None
    fits = max(1, int(quota) - 1)
    throttled = (
        f"; it was throttled for {machine.throttled_s:.1f} s of {measured.wall_s:.0f} s" if machine.throttled_s else ""
    )
    return Finding(
        name="cpu-quota",
        cause="The container may use fewer processors than it sees, and the loop uses more.",
        evidence=(
            f"cpu.max allows {quota:.1f} of the {machine.cores} cores that os.cpu_count() shows; {own.num_workers} "
            f"workers beside the training process, torch.get_num_threads() is {machine.intra_op_threads}{throttled}"
        ),
        remedy=(
            f"num_workers={fits if own.num_workers else 0} and torch.set_num_threads({max(1, int(quota))}); or raise "
            f"the limit (docker run --cpus={wanted}, resources.limits.cpu in Kubernetes)"
        ),
    )


@cause("threads-beyond-cores")
def threads_beyond_cores(measured: Measurements) -> Finding | None:
    """Torch computes with more threads than there are cores, so that they wait for each other in every operation."""
    machine, one, free = measured.machine, measured.trial(ONE_THREAD), measured.trial(FREE)
    if machine.intra_op_threads < THRESHOLDS.threads_per_core * machine.usable_cores or not measured.has_step:
        return None
    if machine.accelerator:
        return None
    tried = ""
    if one is not None and one.batch_s and free is not None and free.batch_s:
        if one.batch_s > free.batch_s:
            return None  # they do help
        tried = f"; the step takes {free.batch_s * 1e3:.1f} ms, and {one.batch_s * 1e3:.1f} ms with one thread"
    return Finding(
        name="threads-beyond-cores",
        cause="torch computes with more threads than there are cores, and in every operation they wait for each other.",
        evidence=f"torch.get_num_threads() is {machine.intra_op_threads}, on {machine.usable_cores:g} cores{tried}",
        remedy=(
            f"torch.set_num_threads({max(1, int(machine.usable_cores))}), or leave it out, and OMP_NUM_THREADS, too: "
            "torch starts with a thread for each core"
        ),
    )


@cause("threads-in-workers", "worker_activity")
def threads_in_workers(measured: Measurements) -> Finding | None:
    """Each worker computes with several threads."""
    activity, own = required(measured.worker_activity), measured.settings
    # Python threads alternate under the GIL: several are busy, and one is runnable.
    runnable = max(activity.cores, activity.runnable_threads if _are_native(measured) else 0.0)
    is_native = runnable >= THRESHOLDS.contending_worker_cores
    if not is_native and activity.busy_threads < THRESHOLDS.certain_contending_threads:
        return None
    samples = measured.samples
    waits_for_threads = samples is not None and samples.coordination_fraction >= THRESHOLDS.line_fraction
    if waits_for_threads and not is_native:  # "threads-hold-each-other"
        return None
    if max(activity.busy_threads, runnable) * own.num_workers <= measured.machine.usable_cores:
        return None
    opencv = "; cv2.setNumThreads(0) in the dataset" if "opencv" in activity.libraries else ""
    return Finding(
        name="threads-in-workers",
        cause="Each worker computes with several threads, and together they are more than there are cores.",
        evidence=(
            f"{activity.busy_threads:.1f} busy threads in each of {own.num_workers} workers, on "
            f"{measured.machine.usable_cores:g} cores (libraries with threads that workers have loaded: "
            f"{', '.join(activity.libraries) or 'none that is known'})"
        ),
        remedy=(
            "worker_init_fn=lambda _: torch.set_num_threads(1), and no set_num_threads in the dataset; for OpenMP and "
            f"OpenBLAS, OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 before Python starts{opencv}"
        ),
    )


def _are_native(measured: Measurements) -> bool:
    """Return whether runnable threads are none of Python's: those wait for a busy machine's cores before their lock."""
    samples, parts = measured.samples, loading_parts_s(measured)
    if not measured.machine.is_busy or samples is None:
        return not measured.machine.is_busy
    of_samples_s = sum(parts.get(part, 0.0) for part in OF_SAMPLES)  # the rest is sent by a thread of Python's
    waits = samples.coordination_fraction >= THRESHOLDS.hotspot_fraction
    return not waits and of_samples_s >= THRESHOLDS.costly_line_fraction * sum(parts.values())


@cause("cpu-contention")
def cpu_contention(measured: Measurements) -> Finding | None:
    """The step takes much longer while its loader runs, or the loop is measured to be faster with fewer workers."""
    slowdown, own = step_slowdown(measured), measured.settings
    if slowdown is None or not oversubscribes_cores(measured):
        return None
    fewer = {name: gain for name in (FEWER_WORKERS, NO_WORKERS) if (gain := measured.gain_of(name)) is not None}
    best = max(
        (name for name in fewer if fewer[name].pays(THRESHOLDS.contention_gain)),
        key=lambda name: fewer[name].median,
        default=None,
    )
    if loading_matters(measured):
        best = None  # "workers-cost-more" and "too-many-workers" say it
    if slowdown < THRESHOLDS.step_slowdown and (best is None or measured.machine.is_busy):
        return None
    left = max(1, round(measured.machine.usable_cores) - own.num_workers)
    threads = [f"torch.set_num_threads({left}) in the training process"] * (measured.machine.intra_op_threads > left)
    advice = (
        [required(measured.trial(best)).line, *threads]
        if best is not None
        else threads + ["fewer workers"] * (not fewer)
    )
    if not advice:
        return None
    return Finding(
        name="cpu-contention",
        cause="The step computes on the cores that the workers use, and both become slower.",
        evidence=(
            f"while its loader runs, the step takes {slowdown:.1f} times as long as with free loading; "
            f"torch.get_num_threads() is {measured.machine.intra_op_threads}, with {own.num_workers} workers on "
            f"{measured.machine.usable_cores:g} cores"
        ),
        remedy=", or ".join(advice),
        gain=fewer[best].median if best is not None else None,
        is_measured=best is not None,
        is_uncertain=measured.machine.is_busy,
    )
