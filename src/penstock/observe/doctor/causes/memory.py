"""Causes that lie in memory: copies, caches, pickles and /dev/shm of workers; what the training process keeps."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import CopyOnWrite
from penstock.observe.doctor.step_results import MemoryGrowth
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding


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
    return nbytes >= THRESHOLDS.worker_growth_nbytes and per_sample >= THRESHOLDS.worker_growth_per_sample_nbytes


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


@cause("not-picklable", "dataset_pickle")
def not_picklable(measured: Measurements) -> Finding | None:
    """The dataset cannot be sent to a worker."""
    pickle, own = required(measured.dataset_pickle), measured.settings
    if not pickle.failure or own.kind != "torch" or measured.as_is is not None:
        return None  # if workers made batches, what cannot be pickled was opened here, with the doctor's first samples
    return Finding(
        name="not-picklable",
        cause=f"The dataset cannot be pickled, and a worker that is started with {own.start_method} needs it pickled.",
        evidence=pickle.failure,
        remedy="keep what cannot be pickled out of the dataset, or create it in the worker, when it is first used",
    )


@cause("pickled-for-each-worker", "dataset_pickle")
def pickled_for_each_worker(measured: Measurements) -> Finding | None:
    """A large dataset is pickled once for every worker."""
    pickle, own = required(measured.dataset_pickle), measured.settings
    if pickle.failure or own.kind != "torch":
        return None
    if pickle.nbytes < THRESHOLDS.large_pickle_nbytes and pickle.seconds * own.num_workers < THRESHOLDS.long_pickle_s:
        return None
    first_s = next((trial.startup_s for trial in measured.trials if trial.startup_s is not None), None)
    first = f"; the first batch came after {first_s:.1f} s" if first_s is not None else ""
    return Finding(
        name="pickled-for-each-worker",
        cause="The dataset is large, and it is pickled, sent and unpickled for every worker.",
        evidence=(
            f"{size_text(pickle.nbytes)} and {pickle.seconds:.2f} s to pickle, {own.num_workers} times at every start "
            f"({own.start_method}); most of it is {pickle.largest or 'the dataset itself'}{first}"
        ),
        remedy=(
            f"keep {pickle.largest or 'the data'} in a file and open it in the worker (numpy.load(..., mmap_mode='r')) "
            "or as a tensor, which is shared; penstock.DataLoader pickles once; persistent_workers=True starts once"
        ),
    )


@cause("prefetches-much", "samples")
def prefetches_much(measured: Measurements) -> Finding | None:
    """Many batches are made ahead, and take much memory."""
    own, samples = measured.settings, required(measured.samples)
    batches = min(own.num_workers * own.prefetch_factor, own.length or own.num_workers * own.prefetch_factor)
    ahead_nbytes = batches * samples.batch_nbytes
    if own.prefetch_factor <= THRESHOLDS.usual_prefetch_factor or ahead_nbytes < THRESHOLDS.prefetched_nbytes:
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
    if needed_nbytes < THRESHOLDS.shm_fraction * free_nbytes:
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


@cause("graphs-kept", "step_calls")
def graphs_kept(measured: Measurements) -> Finding | None:
    """Losses of all steps are kept with their graphs.

    Source: PyTorch's FAQ, "Don't accumulate history across your training loop".
    """
    step = required(measured.step_calls)
    if step.graphs_held_by is None:
        return None
    return Finding(
        name="graphs-kept",
        cause="Every step keeps its loss with the graph that computed it, so memory grows with each step.",
        evidence=f"after {step.steps} steps the graphs of all of them were alive; {step.graphs_held_by} holds them",
        remedy="keep the value alone: loss.detach(), or loss.item() where nothing waits for a device",
    )


@cause("evaluation-keeps-graphs", "evaluation_graph")
def evaluation_keeps_graphs(measured: Measurements) -> Finding | None:
    """An evaluation adds up losses or outputs with gradients on, and nothing computes gradients of them."""
    kept = required(measured.evaluation_graph)
    return Finding(
        name="evaluation-keeps-graphs",
        cause="An evaluation runs with gradients on, and keeps the graphs of all its batches until it ends.",
        evidence=(
            f"{kept.name} held {size_text(kept.batch_nbytes)} more with each batch of {kept.dataset}, "
            f"{size_text(kept.batches * kept.batch_nbytes)} for {kept.batches} batches; its model is in evaluation mode"
        ),
        remedy="with torch.no_grad(): around it, or @torch.no_grad() on its function; it takes less time, too",
    )


@cause("kept-by-the-program", "memory_growth")
def kept_by_the_program(measured: Measurements) -> Finding | None:
    """A variable of the program keeps something of every step.

    What an epoch may begin anew counts if it is much by the epoch's end, or if graphs are kept, which nothing needs
    after their step.
    """
    kept, length = required(measured.memory_growth), measured.settings.length
    if measured.step_calls is not None and measured.step_calls.graphs_held_by is not None:
        return None  # `graphs-kept` says it
    epoch_nbytes = kept.step_nbytes * (length or 0)
    if kept.is_emptied and not kept.has_graph and epoch_nbytes < THRESHOLDS.kept_epoch_nbytes:
        return None
    in_epoch = f", {size_text(epoch_nbytes)} in an epoch of {length} batches" if length else ""
    what = "a tensor with the graph that computed it" if kept.has_graph else "something"
    return Finding(
        name="kept-by-the-program",
        cause=f"{kept.name} keeps {what} of every step, so memory grows with each step.",
        evidence=(
            f"{kept.name} ({_KINDS.get(kept.kind, kept.kind)}) grew with each of {kept.steps} steps, by "
            f"{size_text(kept.step_nbytes)}{in_epoch}"
        ),
        remedy=_keep_less(kept),
    )


@cause("kept-by-the-program", "graphs_of_epochs")
def graphs_kept_of_epochs(measured: Measurements) -> Finding | None:
    """A history keeps a result of every epoch, such as a validation's loss, with the graph that computed it."""
    kept = required(measured.graphs_of_epochs)
    return Finding(
        name="kept-by-the-program",
        cause=f"{kept.name} keeps a tensor with the graph that computed it of every epoch, so memory grows with each.",
        evidence=(
            f"{kept.name} ({_KINDS.get(kept.kind, kept.kind)}) was longer when the next epoch began, by "
            f"{size_text(kept.step_nbytes)} with what its tensors' graphs keep"
        ),
        remedy="with torch.no_grad(): around an evaluation; and keep the value alone: .item(), or .detach()",
    )


_LRU_CACHE = "_lru_cache_wrapper"
_KINDS = {_LRU_CACHE: "functools.lru_cache"}


def _keep_less(kept: MemoryGrowth) -> str:
    if kept.has_graph:
        return "keep the value alone: .detach(), or .item() where nothing waits for a device; no create_graph=True"
    if kept.is_of_views:
        return "keep a copy of the part that is needed, x[i].clone(): a view keeps the whole tensor"
    if kept.kind == _LRU_CACHE:
        return "limit its size (maxsize=), or take it off: what it is asked for is new in each step"
    return "keep what is needed of it, as a number; or bound it: collections.deque(maxlen=...), or write it to a file"
