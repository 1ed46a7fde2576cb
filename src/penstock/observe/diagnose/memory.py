"""Memory that workers take: copies of the dataset, caches, and room in /dev/shm."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.observe.examination import Examination, Growth
from penstock.observe.finding import Finding

_LEAST_GROWTH = 2 << 20
_LEAST_EACH = 1024
_LARGE_PICKLE = 32 << 20
_LONG_PICKLE_S = 0.5


def copy_on_write(found: Examination) -> Finding | None:
    """Workers copy the dataset's Python objects by reading them."""
    growth = found.growth
    if growth is None or growth.grew or not growth.attribute or not _grows(growth):
        return None
    each = growth.nbytes // growth.samples
    return Finding(
        name="copy-on-write",
        cause="Every worker comes to have its own copy of the dataset's Python objects, page by page, by reading them.",
        evidence=(
            f"a forked worker's own memory grew by {size_text(growth.nbytes)} over {growth.samples} new samples "
            f"({size_text(each)} each), and by {size_text(max(0, growth.again_nbytes))} over the same ones again; "
            f"{growth.attribute} holds {growth.objects} Python objects, about {size_text(growth.objects_nbytes)} "
            f"for each of {found.settings.num_workers} workers in the end"
        ),
        remedy=(
            f"keep them in one array: {growth.attribute} = numpy.array({growth.attribute}) (strings too; or pyarrow), "
            "or in a file that is memory-mapped"
        ),
    )


def cache_in_each_worker(found: Examination) -> Finding | None:
    """The dataset keeps what it has made, in each worker by itself."""
    growth = found.growth
    if growth is None or not growth.grew or not _grows(growth):
        return None
    return Finding(
        name="cache-in-each-worker",
        cause="The dataset keeps what it makes, and each worker keeps its own.",
        evidence=(
            f"{growth.grew} had more elements after {growth.samples} samples than before, and a worker's memory grew "
            f"by {size_text(growth.nbytes)}; {found.settings.num_workers} workers do so"
        ),
        remedy=f"fill {growth.grew} before the workers start, in tensors or arrays that they share; or bound it",
    )


def _grows(growth: Growth) -> bool:
    for_good = growth.nbytes - max(0, growth.again_nbytes)
    return for_good >= _LEAST_GROWTH and for_good / max(1, growth.samples) >= _LEAST_EACH


def pickled_for_each_worker(found: Examination) -> Finding | None:
    """A large dataset is pickled once for every worker."""
    pickled, own = found.pickled, found.settings
    if pickled is None or own.kind != "torch":
        return None
    if pickled.failure:
        return Finding(
            name="not-picklable",
            cause=f"The dataset cannot travel to a worker that is started by {own.start_method}.",
            evidence=pickled.failure,
            remedy="keep what cannot be pickled out of the dataset, or make it when it is first used (in the worker)",
        )
    if pickled.nbytes < _LARGE_PICKLE and pickled.seconds * own.num_workers < _LONG_PICKLE_S:
        return None
    first = next((trial.startup_s for trial in found.trials if trial.startup_s is not None), None)
    came = f"; the first batch came after {first:.1f} s" if first is not None else ""
    return Finding(
        name="pickled-for-each-worker",
        cause="The dataset is large, and is pickled, sent and unpickled for every worker.",
        evidence=(
            f"{size_text(pickled.nbytes)} and {pickled.seconds:.2f} s to pickle, {own.num_workers} times at "
            f"every start "
            f"({own.start_method}); most of it is {pickled.largest or 'the dataset itself'}{came}"
        ),
        remedy=(
            f"keep {pickled.largest or 'the data'} in a file and open it in the worker (numpy.load(..., "
            f"mmap_mode='r')), or "
            "as a tensor, which is shared; penstock.DataLoader pickles once; persistent_workers=True starts once"
        ),
    )


def shm_too_small(found: Examination) -> Finding | None:
    """Batches under way may not fit into /dev/shm."""
    own, samples, free = found.settings, found.samples, found.machine.shm_free_nbytes
    if samples is None or free is None or own.kind != "torch" or not own.start_method:
        return None
    under_way = own.num_workers * own.prefetch_factor + 1
    wanted = under_way * samples.batch_nbytes
    if wanted < free / 2:
        return None
    return Finding(
        name="shm-too-small",
        cause="Batches under way do not fit into /dev/shm" + ("." if wanted > free else " by much."),
        evidence=(
            f"{under_way} batches of {size_text(samples.batch_nbytes)} ({own.num_workers} workers, "
            f"prefetch_factor={own.prefetch_factor}) are {size_text(wanted)}; /dev/shm has {size_text(free)} left of "
            f"{size_text(found.machine.shm_nbytes or free)}"
        ),
        remedy=(
            f"docker run --shm-size={max(1, -(-2 * wanted >> 30))}g (or --ipc=host), or prefetch_factor=1; "
            "penstock.DataLoader does not use /dev/shm"
        ),
    )
