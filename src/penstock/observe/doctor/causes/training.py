"""Causes that make a result wrong and no loop slow: what steps train, with which samples, of which types."""

from __future__ import annotations

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.content_results import SharedSamples
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.finding import Finding

_SEEN_STEPS = 32
"""Steps: what is trained in turns may wait for as many."""
_UNTRAINED_FRACTION = 0.5
"""Of the parameters: beyond it, a head is trained on a backbone that is not to be."""

_SHOWN = 4


@cause("never-updated", "step_calls")
def never_updated(measured: Measurements) -> Finding | None:
    """Gradients are cleared between `backward()` and the optimizer's step."""
    if not required(measured.step_calls).updates_nothing:
        return None
    return Finding(
        name="never-updated",
        cause="The optimizer never has gradients to use: the weights stay as they were made, but for a decay.",
        evidence="in every observed step gradients were computed, and none was left when optimizer.step() began",
        remedy="optimizer.zero_grad() before loss.backward(), and nothing that clears gradients between it and step()",
    )


@cause("gradients-not-cleared", "step_calls")
def gradients_not_cleared(measured: Measurements) -> Finding | None:
    """Gradients are added to those with which parameters were updated already."""
    calls = required(measured.step_calls).kept_gradients
    if not calls:
        return None
    return Finding(
        name="gradients-not-cleared",
        cause="Every step adds its gradients to those of all steps before, with which parameters were updated already.",
        evidence=f"parameters have these gradients still, and have changed since: {calls[0].line}",
        remedy="optimizer.zero_grad() before loss.backward(), once for each optimizer.step()",
    )


@cause("left-out-of-optimizer", "step_calls")
def left_out_of_optimizer(measured: Measurements) -> Finding | None:
    """Parameters of a model get gradients, and the optimizer was made without them.

    Where they are most of the model, it is a backbone that is not to be trained.
    """
    step = required(measured.step_calls)
    steps = sum(window.batches for trial in measured.trials for window in trial.windows)
    is_few = step.untrained_parameters < _UNTRAINED_FRACTION * max(1, step.parameters)
    if not step.left_out or not is_few or steps < _SEEN_STEPS:
        return None
    shown = ", ".join(step.left_out[:_SHOWN]) + (", ..." if len(step.left_out) > _SHOWN else "")
    return Finding(
        name="left-out-of-optimizer",
        cause="Parameters get gradients in every step, and no optimizer has them: they stay as they were made.",
        evidence=(
            f"parameters of the shapes {shown} did not change in {steps} steps, while others did; no optimizer of the "
            "program holds them"
        ),
        remedy=(
            "make the optimizer when the model is complete: a layer that is replaced later is not in it, nor one "
            "that is kept in a list and not in nn.ModuleList; or requires_grad_(False), if it is not to be trained"
        ),
    )


@cause("trains-in-evaluation-mode", "step_calls")
def trains_in_evaluation_mode(measured: Measurements) -> Finding | None:
    """A model is trained after `model.eval()`, which is how many libraries return it, too.

    Batch norm alone may be meant to keep its statistics, as in fine-tuning with small batches, and so may a part of a
    model that is in training mode otherwise.
    """
    step = required(measured.step_calls)
    if not measured.evaluates_later and not (step.trains and step.evaluates):
        return None
    when = " after its first epoch" if measured.evaluates_later else ""
    seen = "it was in training mode in the steps of the first epoch, and not in one of the next"
    if not measured.evaluates_later:
        seen = f"in all observed steps: {' and '.join(step.evaluates)} with training=False, in a module that is updated"
    return Finding(
        name="trains-in-evaluation-mode",
        cause=f"The model is trained in evaluation mode{when}.",
        evidence=seen,
        remedy=(
            "model.train() before the steps of each epoch: model.eval() lasts until then, that of a validation and "
            "that of a library which has loaded the model"
        ),
        is_uncertain=not (step.evaluates_whole or measured.evaluates_later),
    )


@cause("loss-of-probabilities", "step_calls")
def loss_of_probabilities(measured: Measurements) -> Finding | None:
    """A loss that applies softmax or sigmoid itself gets what has passed one.

    Source: the documentation of `torch.nn.CrossEntropyLoss`, `BCEWithLogitsLoss` and `NLLLoss`.
    """
    calls = required(measured.step_calls).probabilities
    if not calls:
        return None
    (call, *_) = calls
    takes, remedy = _TAKES[call.what]
    return Finding(
        name="loss-of-probabilities",
        cause=f"{call.what} takes {takes}, and gets probabilities: its gradients are far too small, or wrong.",
        evidence=f"in every observed step a softmax or sigmoid is the last operation before it: {call.line}",
        remedy=remedy,
    )


_LOGITS, _LOGARITHMS = "logits, and makes probabilities of them", "logarithms of probabilities"

_TAKES = {
    "cross_entropy": (_LOGITS, "no softmax before it: cross_entropy(logits, labels)"),
    "nll_loss": (_LOGARITHMS, "torch.log_softmax(logits, 1), or cross_entropy(logits, labels) in its place"),
    "kl_div": (_LOGARITHMS, "torch.log_softmax(logits, 1) for its first argument"),
    "binary_cross_entropy_with_logits": (
        _LOGITS,
        "no sigmoid before it: binary_cross_entropy_with_logits(logits, labels)",
    ),
}


@cause("loss-of-all-pairs", "step_calls")
def loss_of_all_pairs(measured: Measurements) -> Finding | None:
    """Predictions [n, 1] and labels [n] are broadcast to [n, n]."""
    calls = required(measured.step_calls).broadcast_losses
    if not calls:
        return None
    return Finding(
        name="loss-of-all-pairs",
        cause="The loss compares every prediction with every label of its batch, as their shapes are broadcast.",
        evidence=f"shapes {calls[0].what}: {calls[0].line}",
        remedy="predictions.squeeze(1), or labels[:, None], so that both have one shape",
    )


@cause("in-train-and-validation")
def in_train_and_validation(measured: Measurements) -> Finding | None:
    """An evaluation has samples that the loop trains on."""
    candidates = [one for one in measured.shared_samples if one.extent != "same"]
    shared = max(candidates, key=lambda one: (one.extent == "partly", one.samples), default=None)
    if shared is None:
        return None
    return Finding(
        name="in-train-and-validation",
        cause=f"{shared.loader} evaluates samples that the loop trains on, so its result is better than on new data.",
        evidence=(
            f"{shared.samples} of the {shared.compared} samples of {shared.loader} are among the {shared.trained} of "
            f"the training loader: {_indices(shared)}"
        ),
        remedy=(
            "if it is to measure how well the training data is learned, nothing; else leave these samples out of the "
            "training set"
            if shared.extent == "inside"
            else "leave them out of one of the two sets; torch.utils.data.random_split makes sets that share no index, "
            "and sets that are split anew each time need one seed"
        ),
        is_uncertain=shared.extent == "inside",
    )


def _indices(shared: SharedSamples) -> str:
    return f"{shared.dataset}[{'], ['.join(map(str, shared.examples))}]"


@cause("images-not-scaled", "step_calls")
def images_not_scaled(measured: Measurements) -> Finding | None:
    """The model's first convolution gets pixels from 0 to 255, or those behind a normalisation that is not for them."""
    images = required(measured.step_calls).whole_images
    if images is None:
        return None
    so_far = " behind ImageNet's mean and standard deviation, which are for values from 0 to 1" * images.is_normalised
    return Finding(
        name="images-not-scaled",
        cause=f"The model's first convolution gets pixels as they are stored, whole numbers up to 255{so_far}.",
        evidence=f"{images.dtype} {list(images.shape)}, whole numbers from {images.low:g} to {images.high:g}",
        remedy=(
            "divide by 255 before the normalisation (torchvision: ToTensor(), or ToDtype(torch.float32, scale=True))"
            if images.is_normalised
            else "divide by 255, or subtract the mean and divide by the standard deviation, unless the model does it"
        ),
        is_uncertain=not images.is_normalised,
    )
