"""Causes that lie in what the training process keeps of every step."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.step_results import MemoryGrowth
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding


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
