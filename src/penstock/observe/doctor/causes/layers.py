"""Causes that lie in how a step uses the layers of its model."""

from __future__ import annotations

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import describe_line, step_is_most
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding

_SHOWN_CALLS = 3


@cause("denormal-numbers", "as_is", "step_calls")
def denormal_numbers(measured: Measurements) -> Finding | None:
    """A step computes with numbers below the smallest normal one, such as states that fade away.

    Source: PyTorch's documentation of `torch.set_flush_denormal`.
    """
    places = {one.line: one.per_step for one in required(measured.step_calls).denormals}
    lines = [line for line in measured.step_lines if line.line in places]
    if not places or not step_is_most(measured):
        return None
    shown = lines[0].line if lines else next(iter(places))
    return Finding(
        name="denormal-numbers",
        cause="The step computes with denormal numbers, almost 0, for which a processor takes tens of times as long.",
        evidence=f"{places[shown]:.0%} of the numbers that this line makes, in each of the observed steps: {shown}",
        remedy="torch.set_flush_denormal(True), before the loop",
        is_uncertain=sum(line.fraction for line in lines) < THRESHOLDS.wasted_step_fraction,
    )


@cause("many-small-parameters", "as_is", "step_calls")
def many_small_parameters(measured: Measurements) -> Finding | None:
    """An optimizer updates many tensors of a few numbers each, one after another."""
    tensors, numbers = required(measured.step_calls).optimized
    if tensors < THRESHOLDS.many_parameters or numbers > THRESHOLDS.small_parameter * tensors:
        return None
    lines = [line for line in measured.step_lines if " torch.optim." in f" {line.calls}"]
    fraction = sum(line.fraction for line in lines)
    if fraction < THRESHOLDS.untrained_line_fraction or not step_is_most(measured):
        return None
    return Finding(
        name="many-small-parameters",
        cause="The optimizer takes a large part of every step: it updates many small tensors, one after another.",
        evidence=(
            f"{fraction:.0%} of the step's time: {describe_line(lines[0])}; it has {tensors} tensors of "
            f"{numbers / tensors:.0f} numbers each on average"
        ),
        remedy=(
            "keep what belongs together in one parameter (nn.Parameter(torch.randn(n, k)), nn.Embedding(n, k)); or "
            "fused=True in the optimizer, which updates all of them in one call"
        ),
    )


@cause("layer-in-a-loop", "step_calls")
def layer_in_a_loop(measured: Measurements) -> Finding | None:
    """One layer is applied many times in a step, in a loop of Python's."""
    calls = required(measured.step_calls).repeated_layers
    if not calls:
        return None
    shown = "; ".join(f"{call.line} ({call.per_step:.0f} times per step)" for call in calls[:_SHOWN_CALLS])
    return Finding(
        name="layer-in-a-loop",
        cause="A layer is applied again and again in each step, in a loop of Python's, to little at a time.",
        evidence=shown + (f"; and {len(calls) - _SHOWN_CALLS} more" if len(calls) > _SHOWN_CALLS else ""),
        remedy=(
            "apply it once, to all of them along a dimension (torch.stack, a batch of sequences); where each call "
            "needs the result of the one before it: nn.LSTM, nn.GRU or nn.RNN, or torch.compile"
        ),
    )


@cause("padded-too-far", "step_calls")
def padded_too_far(measured: Measurements) -> Finding | None:
    """Sequences are padded far beyond the longest one of their batch."""
    calls = [call for call in required(measured.step_calls).padded if call.per_step >= THRESHOLDS.padded_fraction]
    padding = measured.samples.padding if measured.samples is not None else None
    if not calls and padding is None:
        return None
    if calls:
        evidence = f"the last {calls[0].what} have one value in every row of a batch, on average: {calls[0].line}"
    else:
        padding = required(padding)
        evidence = (
            f"the largest sample of a batch has a size of {padding.longest}, and collate_fn makes it {padding.padded}: "
            f"a tensor of shape {padding.shape}, which has one value beyond its samples"
        )
    return Finding(
        name="padded-too-far",
        cause="Batches are padded far beyond their longest sequence, and every step computes with the padding.",
        evidence=evidence,
        remedy=(
            "pad to the longest sequence of each batch, in collate_fn: torch.nn.utils.rnn.pad_sequence(sequences, "
            "batch_first=True); batches of sequences of about one length need less still"
        ),
    )


@cause("backward-again", "step_calls")
def backward_again(measured: Measurements) -> Finding | None:
    """Gradients of several losses of one graph are computed one after another."""
    calls = required(measured.step_calls).backward_again
    if not calls:
        return None
    return Finding(
        name="backward-again",
        cause="Every step computes gradients several times, and keeps the graph that its losses share.",
        evidence=f"retain_graph=True, {calls[0].per_step:.0f} times per step: {calls[0].line}",
        remedy=(
            "add the losses, with their weights, and call backward() once; the gradients add up to the same, where "
            "nothing reads them in between"
        ),
    )


@cause("differences-of-all-pairs", "step_calls")
def differences_of_all_pairs(measured: Measurements) -> Finding | None:
    """Distances are computed by way of every difference, in memory.

    Source: the documentation of `torch.cdist`, on `compute_mode`.
    """
    shares = {line.line: line.fraction for line in measured.step_lines}
    for pairs in required(measured.step_calls).pair_differences:
        share = sum(shares.get(line, 0.0) for line in pairs.lines)
        if share >= THRESHOLDS.pair_fraction:
            return Finding(
                name="differences-of-all-pairs",
                cause="Every step writes the differences of all pairs to memory, and sums them up to distances.",
                evidence=f"{share:.0%} of the step's time, and its backward pass, for {pairs.shapes}: "
                + "; ".join(pairs.lines),
                remedy=(
                    "torch.cdist(x, y); for squared distances (x * x).sum(1)[:, None] - 2 * x @ y.T + (y * y).sum(1), "
                    "and .clamp(min=0), as it rounds"
                ),
            )
    return None


@cause("gradients-not-used", "step_calls")
def gradients_not_used(measured: Measurements) -> Finding | None:
    """Parameters get gradients, and nothing updates them: those of a backbone that is not trained."""
    step = required(measured.step_calls)
    steps = sum(window.batches for trial in measured.trials for window in trial.windows)
    unused = step.untrained_parameters if steps >= THRESHOLDS.seen_steps else step.never_trained
    if unused < THRESHOLDS.untrained_fraction * max(1, step.parameters):
        return None
    return Finding(
        name="gradients-not-used",
        cause="Every step computes gradients for parameters that nothing updates.",
        evidence=(
            f"{unused} of the {step.parameters} parameters that layers multiplied by got gradients, "
            "and stayed as they were, while others were trained"
        ),
        remedy="module.requires_grad_(False) for what is not trained, or its forward pass under torch.no_grad()",
    )


@cause("computes-in-double", "step_calls")
def computes_in_double(measured: Measurements) -> Finding | None:
    """Parameters are float64."""
    step = required(measured.step_calls)
    if step.double_parameters < THRESHOLDS.untrained_fraction * max(1, step.parameters):
        return None
    return Finding(
        name="computes-in-double",
        cause="The model computes in float64: twice the memory of float32, and half its speed or far less.",
        evidence=f"{step.double_parameters} of the {step.parameters} parameters that layers multiplied by are float64",
        remedy="model.float() and float32 batches, unless it needs the digits (NumPy's arrays are float64 by default)",
    )


@cause("dense-embedding-gradients", "step_calls")
def dense_embedding_gradients(measured: Measurements) -> Finding | None:
    """An embedding gets a gradient as large as itself for a few rows.

    Source: the documentation of `torch.nn.Embedding`, on `sparse`.
    """
    calls = required(measured.step_calls).dense_embeddings
    if not calls:
        return None
    shown = "; ".join(f"{call.per_step:.0f} of {call.what} are used: {call.line}" for call in calls[:_SHOWN_CALLS])
    return Finding(
        name="dense-embedding-gradients",
        cause="Every step makes, and applies, a gradient for all rows of an embedding, of which it uses a few.",
        evidence=f"in each step at most {shown}",
        remedy=(
            "nn.Embedding(..., sparse=True), with torch.optim.SparseAdam or SGD for it: they update the rows that are "
            "used, and no others"
        ),
    )
