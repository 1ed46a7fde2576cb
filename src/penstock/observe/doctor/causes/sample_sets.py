"""Causes that make a result wrong and not slow: which samples a loop has, and of which types."""

from __future__ import annotations

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.content_results import SharedSamples
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding


@cause("in-train-and-validation")
def in_train_and_validation(measured: Measurements) -> Finding | None:
    """An evaluation has samples that the loop trains on."""
    candidates = [one for one in measured.shared_samples if one.extent != "same"]
    if not candidates:
        return None
    shared = max(candidates, key=lambda one: (not _is_perhaps(one), one.samples))
    how = ", with the same content" if shared.by_content else ""
    inside = shared.extent == "inside"
    return Finding(
        name="in-train-and-validation",
        cause=f"{shared.loader} evaluates samples that the loop trains on, so its result is better than on new data.",
        evidence=(
            f"{shared.samples} of {shared.compared} samples of {shared.loader} that were compared are among "
            f"{shared.trained} of the training loader's{how}: {_pairs(shared)}"
        ),
        remedy=(
            (
                "if it is to measure how well the training data is learned, nothing; else leave these samples out of "
                "the training set"
                if inside
                else "leave them out of one of the two sets"
            )
            + ("" if shared.by_content else "; torch.utils.data.random_split makes sets that share no index")
            + (", and remove copies before splitting" if shared.by_content else "")
        ),
        is_uncertain=_is_perhaps(shared),
    )


def _is_perhaps(shared: SharedSamples) -> bool:
    """Return whether an evaluation of training data may be meant so, or what was seen may be chance."""
    if shared.extent == "inside" or (shared.by_content and shared.samples < THRESHOLDS.shared_pairs):
        return True
    # An evaluation that is a part of the training set would have this many of the samples that were compared.
    expected = shared.compared * shared.trained / shared.training_size
    return shared.trained < shared.training_size and shared.samples > THRESHOLDS.shared_fraction * expected


def _pairs(shared: SharedSamples) -> str:
    if not shared.by_content:
        return f"{shared.dataset}[{'], ['.join(str(index) for index, _ in shared.examples)}]"
    return ", ".join(f"the training's [{one}] is the evaluation's [{other}]" for one, other in shared.examples)


@cause("samples-twice", "repeated_samples")
def samples_twice(measured: Measurements) -> Finding | None:
    """Different indices of the dataset hold the same sample."""
    seen = required(measured.repeated_samples)
    of_first, of_second = ("", "") if seen.parts is None else (f" of part {part + 1}" for part in seen.parts)
    pairs = ", ".join(f"{one}{of_first} and {other}{of_second}" for one, other in seen.examples)
    one, other = seen.examples[0]
    return Finding(
        name="samples-twice",
        cause="Different indices of the dataset hold the same sample, so it counts more than others.",
        evidence=(
            f"of {seen.checked} samples of {seen.dataset} that were compared, {seen.repeated} are the same as another "
            f"one, byte for byte and before any transform: {pairs}"
        ),
        remedy=(
            f"look at dataset[{one}]{of_first} and dataset[{other}]{of_second}; remove copies, before data is "
            "split into sets, or change nothing where they are there on purpose (oversampling)"
        ),
        is_uncertain=True,
    )


@cause("types-differ", "samples")
def types_differ(measured: Measurements) -> Finding | None:
    """A field is of one type in some samples and of another in others."""
    changes = required(measured.samples).type_changes
    if not changes or not measured.settings.collates_by_default:
        return None
    python = [change for change in changes if any(kind.name in ("int", "float", "bool") for kind in change.types)]
    change = next((one for one in changes if one not in python), changes[0])
    types = ", ".join(f"{kind.name} in dataset[{kind.index!r}]" for kind in change.types)
    more = f"; {len(changes) - 1} more fields" if len(changes) > 1 else ""
    return Finding(
        name="types-differ",
        cause="A field has another type in some samples, so the type of a batch depends on the samples in it.",
        evidence=f"sample{change.field}: {types}{more}",
        remedy="convert it in __getitem__ to one type: float(value), array.astype(numpy.float32), tensor.float()",
        is_uncertain=change in python,
    )


@cause("images-not-scaled", "step_calls")
def images_not_scaled(measured: Measurements) -> Finding | None:
    """The model's first convolution gets pixels from 0 to 255."""
    images = required(measured.step_calls).whole_images
    if images is None:
        return None
    return Finding(
        name="images-not-scaled",
        cause="The model's first convolution gets pixels as they are stored, whole numbers up to 255.",
        evidence=f"{images.dtype} {list(images.shape)}, whole numbers from {images.low:g} to {images.high:g}",
        remedy="divide by 255, or subtract the mean and divide by the standard deviation, unless the model does it",
        is_uncertain=True,
    )
