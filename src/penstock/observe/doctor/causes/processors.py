"""Causes that lie in the processors: fewer than the loop assumes, or more threads than there are cores."""

from __future__ import annotations

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import loading_matters
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.trial import FEWER_WORKERS, FREE
from penstock.observe.record.finding import Finding

_THROTTLED_FRACTION = 0.05
"""Of the measured time: a cgroup that throttles less than this hardly delays the loop."""
_CONTENDING_WORKER_CORES = 1.3
"""Cores per worker: threads under the GIL use or want one core together; only native threads want more."""
_CERTAIN_CONTENDING_THREADS = 4.0
"""Busy threads per worker: this many are a native thread pool, even if no core is left to run them."""
_THREADS_PER_CORE = 1.9
"""Threads of torch per core: a machine with two hardware threads per core may count either of them."""


@cause("cpu-quota")
def cpu_quota(measured: Measurements) -> Finding | None:
    """The cgroup allows fewer processors than the machine shows, and the loop uses more."""
    machine, own = measured.machine, measured.settings
    quota = machine.quota_cores
    if quota is None or quota >= machine.cores:
        return None
    wanted = max(own.num_workers + 1, 1 if machine.accelerator else machine.intra_op_threads)
    if wanted <= quota and machine.throttled_s <= _THROTTLED_FRACTION * measured.wall_s:
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
    machine = measured.machine
    if machine.intra_op_threads < _THREADS_PER_CORE * machine.usable_cores or not measured.has_step:
        return None
    if machine.accelerator:
        return None
    return Finding(
        name="threads-beyond-cores",
        cause="torch computes with more threads than there are cores, and in every operation they wait for each other.",
        evidence=f"torch.get_num_threads() is {machine.intra_op_threads}, on {machine.usable_cores:g} cores",
        remedy=(
            f"torch.set_num_threads({max(1, int(machine.usable_cores))}), or leave it out, and OMP_NUM_THREADS, too: "
            "torch starts with a thread for each core"
        ),
    )


@cause("threads-in-workers", "worker_activity")
def threads_in_workers(measured: Measurements) -> Finding | None:
    """Each worker computes with several threads."""
    activity, own = required(measured.worker_activity), measured.settings
    # Python threads alternate under the GIL: several are busy, and one is runnable. On a busy machine, where they wait
    # for a core before their lock, they look like native ones.
    runnable = max(activity.cores, 0.0 if measured.machine.is_busy else activity.runnable_threads)
    is_native = runnable >= _CONTENDING_WORKER_CORES
    if not is_native and activity.busy_threads < _CERTAIN_CONTENDING_THREADS:
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


@cause("cpu-contention", "as_is")
def cpu_contention(measured: Measurements) -> Finding | None:
    """The step takes much longer while its loader runs: workers and step share cores, and fewer workers were faster."""
    own, machine, now, free = measured.settings, measured.machine, required(measured.as_is), measured.trial(FREE)
    gain = measured.gain_of(FEWER_WORKERS)
    if free is None or not free.batch_s or not own.num_workers or machine.accelerator or machine.is_busy:
        return None
    if own.num_workers + machine.intra_op_threads <= machine.usable_cores or gain is None:
        return None
    slowdown = (now.step_s or 0.0) / free.batch_s
    if slowdown < thresholds.STEP_SLOWDOWN or not gain.pays() or loading_matters(measured):
        return None
    return Finding(
        name="cpu-contention",
        cause="The step computes on the cores that the workers use, and both become slower.",
        evidence=(
            f"while its loader runs, the step takes {slowdown:.1f} times as long as with free loading; "
            f"torch.get_num_threads() is {machine.intra_op_threads}, with {own.num_workers} workers on "
            f"{machine.usable_cores:g} cores"
        ),
        remedy=required(measured.trial(FEWER_WORKERS)).line,
        gain=gain.median,
        is_measured=True,
    )
