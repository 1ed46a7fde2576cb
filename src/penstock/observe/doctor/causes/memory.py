"""Causes that lie in memory: copies, caches, pickles and /dev/shm of workers; what the training process keeps."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import CopyOnWrite
from penstock.observe.record.finding import Finding

_UNKNOWN_LENGTH = 1000
"""Batches: of an epoch whose length nobody knows: a stream's is long."""
_KEPT_EPOCH_NBYTES = 512 << 20
"""Bytes in an epoch: the outputs of an epoch that are kept for its metric are mostly less."""
_WORKER_GROWTH_NBYTES = 2 << 20
"""Bytes: allocator arenas of a new worker grow by up to about this without any copy."""
_WORKER_GROWTH_PER_SAMPLE_NBYTES = 1024
"""Bytes per sample: a quarter of a page: what is copied on write grows by pages."""
_USUAL_PREFETCH_FACTOR = 8
"""Batches per worker: fewer hide any loader whose samples take about equally long."""
_PREFETCHED_NBYTES = 512 << 20
"""Bytes: batches that are made ahead and take less are nobody's problem."""
_SHM_FRACTION = 0.5
"""Of the free /dev/shm: batch sizes vary and other programs use /dev/shm, too; full, it kills workers."""


@cause("copy-on-write", "copy_on_write")
def copy_on_write(measured: Measurements) -> Finding | None:
    """Workers copy the dataset's Python objects by reading them."""
    growth = required(measured.copy_on_write)
    if growth.growing_attribute or not growth.attribute or not _grows(growth):
        return None
    per_sample = growth.nbytes // growth.samples
    return Finding(
        name="copy-on-write",
        cause="Every worker ends up with its own copy of the dataset's Python objects: reading one writes to it.",
        evidence=(
            f"a forked worker's private memory grew by {size_text(growth.nbytes)} over {growth.samples} new samples "
            f"({size_text(per_sample)} each), and by {size_text(max(0, growth.repeat_nbytes))} over the same ones once "
            f"more; {growth.attribute} holds {growth.objects} Python objects, about {size_text(growth.objects_nbytes)} "
            f"for each of {measured.settings.num_workers} workers in the end"
        ),
        remedy=(
            f"keep them in memory that all workers share: {growth.attribute} = penstock.shared({growth.attribute}), "
            "read as before; or in one array, or in a file that is memory-mapped"
        ),
    )


@cause("cache-in-each-worker", "copy_on_write")
def cache_in_each_worker(measured: Measurements) -> Finding | None:
    """The dataset caches what it makes, separately in each worker."""
    growth = required(measured.copy_on_write)
    if not growth.growing_attribute or not _grows(growth) or 2 * growth.repeat_nbytes > growth.nbytes:
        return None
    return Finding(
        name="cache-in-each-worker",
        cause="The dataset caches what it makes, and each worker has a cache of its own.",
        evidence=(
            f"{growth.growing_attribute} had more elements after {growth.samples} samples than before, and a worker's "
            f"memory grew by {size_text(growth.nbytes)}; {measured.settings.num_workers} workers do so"
        ),
        remedy=(
            "limit its size (maxsize=), or keep what is made in arrays that workers share, before they start"
            if _is_lru_cache(growth)
            else f"fill {growth.growing_attribute} before the workers start, with tensors or arrays that they share; "
            "or limit its size"
        ),
    )


def _is_lru_cache(growth: CopyOnWrite) -> bool:
    return growth.growing_attribute.startswith("the lru_cache")


def _grows(growth: CopyOnWrite) -> bool:
    return _is_much(growth.nbytes - max(0, growth.repeat_nbytes), growth.samples)


def _is_much(nbytes: int, samples: int) -> bool:
    per_sample = nbytes / max(1, samples)
    return nbytes >= _WORKER_GROWTH_NBYTES and per_sample >= _WORKER_GROWTH_PER_SAMPLE_NBYTES


@cause("kept-by-the-dataset", "copy_on_write")
def kept_by_the_dataset(measured: Measurements) -> Finding | None:
    """The dataset keeps something of each sample that it makes, each time that it makes one."""
    growth = required(measured.copy_on_write)
    if not growth.growing_attribute or 2 * growth.repeat_nbytes <= growth.nbytes:
        return None
    if not _is_much(growth.repeat_nbytes, growth.samples):
        return None
    return Finding(
        name="kept-by-the-dataset",
        cause="The dataset keeps something of every sample that it makes: memory grows until a worker is killed.",
        evidence=(
            f"{growth.growing_attribute} had more elements after {growth.samples} samples than before; a worker's "
            f"memory grew by {size_text(growth.nbytes)} then, and by {size_text(growth.repeat_nbytes)} when it made "
            "the same samples once more"
        ),
        remedy=(
            "limit its size (maxsize=), or take it off: what it is asked for is new each time, in each worker"
            if _is_lru_cache(growth)
            else f"take {growth.growing_attribute} out of the dataset, whose copy in a worker the training process "
            "never sees: return what is to be kept with the sample; or bound it: collections.deque(maxlen=...)"
        ),
    )


@cause("prefetches-much", "samples")
def prefetches_much(measured: Measurements) -> Finding | None:
    """Many batches are made ahead, and take much memory."""
    own, samples = measured.settings, required(measured.samples)
    batches = min(own.num_workers * own.prefetch_factor, own.length or own.num_workers * own.prefetch_factor)
    ahead_nbytes = batches * samples.batch_nbytes
    if own.prefetch_factor <= _USUAL_PREFETCH_FACTOR or ahead_nbytes < _PREFETCHED_NBYTES:
        return None
    return Finding(
        name="prefetches-much",
        cause="Far more batches are made ahead than hide loading, and they take memory.",
        evidence=(
            f"up to {batches} batches of {size_text(samples.batch_nbytes)} ({own.num_workers} workers, prefetch_factor="
            f"{own.prefetch_factor}) are {size_text(ahead_nbytes)}"
        ),
        remedy="prefetch_factor=2, or 4 where samples take very different times",
    )


@cause("shm-too-small", "samples")
def shm_too_small(measured: Measurements) -> Finding | None:
    """The batches in flight may not fit into /dev/shm."""
    own, samples, free_nbytes = measured.settings, required(measured.samples), measured.machine.shm_free_nbytes
    if free_nbytes is None or own.kind != "torch" or not own.start_method:
        return None
    in_flight = own.num_workers * own.prefetch_factor + 1
    needed_nbytes = in_flight * samples.batch_nbytes
    if needed_nbytes < _SHM_FRACTION * free_nbytes:
        return None
    fits = "do not fit" if needed_nbytes > free_nbytes else "barely fit"
    return Finding(
        name="shm-too-small",
        cause=f"The batches in flight {fits} into /dev/shm.",
        evidence=(
            f"{in_flight} batches of {size_text(samples.batch_nbytes)} ({own.num_workers} workers, "
            f"prefetch_factor={own.prefetch_factor}) need {size_text(needed_nbytes)}; /dev/shm has "
            f"{size_text(free_nbytes)} left of {size_text(measured.machine.shm_nbytes or free_nbytes)}"
        ),
        remedy=(
            f"docker run --shm-size={max(1, -(-2 * needed_nbytes >> 30))}g (or --ipc=host), or prefetch_factor=1; "
            "penstock.DataLoader does not use /dev/shm"
        ),
    )


@cause("kept-by-the-program")
def kept_by_the_program(measured: Measurements) -> Finding | None:
    """The program keeps tensors of every step.

    Those with the graphs that computed them are kept for nothing: nothing needs them after their step. Others may be
    the outputs of an epoch, and count if an epoch has very many of them.

    Source: PyTorch's FAQ, "Don't accumulate history across your training loop".
    """
    length = measured.settings.length
    for kept in measured.kept_tensors:
        has_graph = kept.has_graph or kept.is_chain
        epoch_nbytes = kept.step_nbytes * (length or _UNKNOWN_LENGTH)
        if not has_graph and epoch_nbytes < _KEPT_EPOCH_NBYTES:
            continue
        what = "Each step makes one graph longer" if kept.is_chain else "The program keeps tensors of every step"
        held = f", held by {kept.held_by}" if kept.held_by else ""
        in_epoch = f", {size_text(epoch_nbytes)} in an epoch of {length} batches" if length and kept.step_nbytes else ""
        return Finding(
            name="kept-by-the-program",
            cause=f"{what}{', with the graphs that computed them' * (kept.has_graph and not kept.is_chain)}: "
            "memory grows with each step.",
            evidence=(
                f"made at {kept.line}; of {kept.steps} steps, {size_text(kept.step_nbytes)} of each{held}{in_epoch}"
            ),
            remedy=(
                "keep the value alone: .detach(), or .item() where nothing waits for a device; no create_graph=True"
                if has_graph
                else "keep what is needed of it, as a number; or bound it: collections.deque(maxlen=...), or write it "
                "to a file"
            ),
        )
    return None
