"""What was seen of the steps of a loop: frozen data, without any judgement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """A call in the training step that blocks it, or that cannot do what it asks for."""

    what: str
    """As in ".item()"."""

    line: str
    """The source line, with its file."""

    per_step: float
    """Calls per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeImages:
    """Floating-point images of whole numbers, as a model's first convolution got them."""

    shape: tuple[int, ...]
    """[samples, channels, height, width]."""

    dtype: str
    """As in "float32"."""

    low: float
    """The smallest value."""

    high: float
    """The largest value."""

    is_normalised: bool = False
    """Whether they were so before ImageNet's mean and standard deviation, which are for values from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensors:
    """Tensors that outlive their step, step after step, as `penstock.watch_leaks` found them."""

    line: str
    """Where they were made, with its file."""

    step_nbytes: int
    """Bytes that are kept of each step."""

    steps: int
    """From how many of the watched steps they are."""

    has_graph: bool
    """Whether they keep the graphs that computed them."""

    is_chain: bool
    """Whether it is one graph that each step makes longer."""

    held_by: str
    """What refers to them, as in "a list of 12"; empty if no container does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCalls:
    """Calls that every observed step made."""

    steps: int
    """How many steps were observed."""

    synchronizing: tuple[StepCall, ...] = ()
    """Calls that wait for the device."""

    pageable_copies: tuple[StepCall, ...] = ()
    """Copies with non_blocking=True from memory that is not pinned."""

    double_casts: tuple[StepCall, ...] = ()
    """Calls that turn float64 tensors into a smaller type."""

    computes_in_double: bool = False
    """Whether a matrix product or a convolution was computed in float64."""

    parameters: int = 0
    """How many numbers the parameters have that layers multiplied by."""

    left_out: tuple[str, ...] = ()
    """Shapes of parameters that get gradients and do not change, and that no optimizer has."""

    untrained_parameters: int = 0
    """Numbers of the parameters that got gradients and did not change, while others did."""

    updates_nothing: bool = False
    """Whether gradients were computed, and gone each time that an optimizer was to use them."""

    evaluates: tuple[str, ...] = ()
    """"dropout" and "batch norm", where all such layers that are trained are in evaluation mode."""

    evaluates_whole: bool = False
    """Whether dropout is so in a model that has no module in training mode around it."""

    kept_gradients: tuple[StepCall, ...] = ()
    """Lines that compute gradients and add them to those with which parameters were updated before."""

    probabilities: tuple[StepCall, ...] = ()
    """Losses of logits, or of logarithms, that get probabilities; `what` is the function."""

    broadcast_losses: tuple[StepCall, ...] = ()
    """Losses that compare every prediction with every label; `what` are both shapes."""

    whole_images: WholeImages | None = None
    """What the first convolution of every observed step got; None where that was no image of whole numbers."""

    leaves_gaps_out: bool = False
    """Whether batches had values that are not finite, and the loss of each of them was finite: a mask, or a target that
    the loss leaves out."""

    uses_labels: bool = False
    """Whether a step computed something of the batch's labels and another tensor, such as a loss."""

    trains: bool = False
    """Whether a step computed gradients, by `backward()`."""

    debugged_by: tuple[str, ...] = ()
    """What was on that is for debugging, and slows down every operation."""
