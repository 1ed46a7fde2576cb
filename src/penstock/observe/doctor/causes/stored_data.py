"""Causes that lie in what datasets keep: data that samples change, numbers of classes, caches that find nothing."""

from __future__ import annotations

import re

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.finding import Finding

_SPECIAL = 4
"""Rows of a layer beside those of the names, as for padding."""

_BY_DESIGN = re.compile(
    r"ema|average|avg|mean|running|momentum|memory|bank|history|state|prev|last|pool|buffer|score|priorit",
    re.IGNORECASE,
)
"""Words of names of data that samples may be meant to change."""


@cause("changed-in-place", "changed_data")
def changed_in_place(measured: Measurements) -> Finding | None:
    """Samples change the data that they are made of."""
    found, own = required(measured.changed_data), measured.settings
    # New workers begin with the data as the training process has them, so little piles up in an epoch.
    outlives = not own.num_workers or own.persistent_workers
    name = found.attribute.partition(".")[2]
    return Finding(
        name="changed-in-place",
        cause=(
            "Making a sample changes the stored data that it is made of, so what is done to it piles up "
            + ("from epoch to epoch." if outlives else "where one worker makes it several times.")
        ),
        evidence=(
            f"{found.samples} of {found.tried} samples, made again of the same random numbers, were other ones because "
            f"{found.attribute} had changed, and the first ones again when it was put back"
        ),
        remedy=(
            f"copy a sample before it is changed: self.{name}[index].clone() (torch), .copy() (NumPy); or compute "
            "something new: x = x * gain instead of x *= gain"
        ),
        is_uncertain=not found.is_returned or not outlives or _BY_DESIGN.search(name) is not None,
    )


@cause("labels-differ", "label_numbers")
def labels_differ(measured: Measurements) -> Finding | None:
    """An evaluation numbers the same classes differently."""
    found = required(measured.label_numbers)
    rows = measured.step_calls.weight_rows if measured.step_calls is not None else ()
    # Where a model has nothing for each number, as one of prototypes, numbers are only compared with each other.
    are_bound = any(found.trained <= number <= found.trained + _SPECIAL for number in rows)
    examples = ", ".join(f"{name!r} is {one} and {other}" for name, one, other in found.examples)
    return Finding(
        name="labels-differ",
        cause=(
            f"{found.loader} gives the same names other numbers than the training does, so its results are wrong, "
            "unless it translates them."
        ),
        evidence=(
            f"{found.attribute}: {found.differing} of {found.common} names that both have differ, the training's "
            f"number and the evaluation's: {examples}"
        ),
        remedy="number the names once, for the training data, and give that mapping to the other datasets",
        is_uncertain=not (found.is_named_so and found.is_meant_alike and are_bound),
    )


@cause("tensors-as-keys", "tensor_keys")
def tensors_as_keys(measured: Measurements) -> Finding | None:
    """A cache of the dataset has tensors as its keys, and finds nothing."""
    found = required(measured.tensor_keys)
    again = f", of {found.numbers} different numbers" if found.numbers < found.keys else ""
    return Finding(
        name="tensors-as-keys",
        cause=(
            "The dataset looks samples up by tensors. Two tensors of the same number are different keys, so nothing is "
            "found that was kept, and memory grows with every sample."
        ),
        evidence=f"{found.attribute} has {found.keys} tensors as keys{again}, of the indices that the loader yields",
        remedy=(
            "index = int(index) at the beginning of __getitem__; or let the sampler yield integers: "
            "yield from torch.multinomial(...).tolist()"
        ),
    )
