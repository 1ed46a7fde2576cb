"""What was seen of the steps of a loop: frozen data, without any judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.observe.doctor.probe_results import HotLine


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
class PairDifferences:
    """Distances of all pairs, made of all their differences."""

    lines: tuple[str, ...]
    """The source lines that subtract, and that sum, with their files."""

    shapes: str
    """Of the differences, and of what is subtracted."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparingLine:
    """A line of the step that makes something of the batch for training, and of nothing that is learned."""

    line: str
    """The source line, with its file."""

    cores: float = 1.0
    """How many it keeps busy."""

    taps: int = 0
    """Of the longest kernel that it convolves with, without FFT; 0 where all of them are short."""

    left_by_fft: float = 1.0
    """Of its time, with such convolutions computed by FFT, as measured for the same sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationGraph:
    """An evaluation with gradients on that keeps the graphs of its batches."""

    dataset: str
    """The class of its dataset."""

    batches: int
    """Of its loader."""

    name: str
    """The variable that keeps them."""

    batch_nbytes: int
    """By how much that grew with a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnusedField:
    """A tensor of the batch that no observed step used."""

    what: str
    """Where it is in the batch, with its type and shape."""

    nbytes: int
    """Its size."""


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

    double_parameters: int = 0
    """How many numbers the float64 ones of the parameters have."""

    parameters: int = 0
    """How many numbers the parameters have that layers multiplied by."""

    left_out: tuple[str, ...] = ()
    """Shapes of parameters that get gradients and do not change, and that no optimizer has."""

    weight_rows: tuple[int, ...] = ()
    """The first sizes of the parameters that layers multiplied by, or looked up: one row for each class or token."""

    optimized: tuple[int, int] = (0, 0)
    """How many tensors the largest optimizer has, and how many numbers they have together."""

    untrained_parameters: int = 0
    """Those of them that got gradients and did not change, while others did."""

    never_trained: int = 0
    """Those of the untrained that no optimizer has, where optimizers have all that changed."""

    repeated_layers: tuple[StepCall, ...] = ()
    """Lines that apply the same layer many times in each step, to little at a time."""

    padded: tuple[StepCall, ...] = ()
    """Lookups in embeddings of batches whose last columns mostly have one value in every row: `per_step` is the
    fraction of such columns, over all batches."""

    backward_again: tuple[StepCall, ...] = ()
    """Lines that compute gradients more than once in a step and keep the graph for it."""

    dense_embeddings: tuple[StepCall, ...] = ()
    """Lookups in embeddings that are most of the parameters, and of which each step uses few rows: `per_step`."""

    denormals: tuple[StepCall, ...] = ()
    """Lines that make tensors of denormal numbers in every step: `per_step` is their fraction."""

    pair_differences: tuple[PairDifferences, ...] = ()
    """Distances that are made of all differences."""

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

    unused_fields: tuple[UnusedField, ...] = ()
    """Tensors of the batch that steps never touch, and that nothing keeps."""

    uses_labels: bool = False
    """Whether a step computed something of the batch's labels and another tensor, such as a loss."""

    trains: bool = False
    """Whether a step computed gradients, by `backward()`."""

    graphs_held_by: str | None = None
    """The variable that holds the autograd graphs of all earlier steps; None where none does."""

    debugged_by: tuple[str, ...] = ()
    """What was on that is for debugging, and slows down every operation."""

    training_lines: tuple[str, ...] = ()
    """The lines that contribute to gradients, or that an optimizer runs in, and those that call them."""

    preparing: tuple[PreparingLine, ...] = ()
    """Those of them that could be computed before the step."""

    keeping_lines: tuple[str, ...] = ()
    """The lines that change tensors which are kept from step to step, such as an average, and those that call them."""

    averaging_lines: tuple[str, ...] = ()
    """Those of them, and others, that keep what they make of parameters, such as an average: less often is another."""

    updates: bool = False
    """Whether an observed step changed parameters."""

    takes_values: bool = False
    """Whether tensors that gradients depend on may be made of values that Python or NumPy computes in the step."""

    observed_lines: tuple[str, ...] | None = None
    """The lines in which torch computes, where training may depend on what Python or NumPy computes in the step: of
    other lines it is then not known whether they contribute. None where it is."""

    operations: Mapping[str, float] = field(default_factory=dict)
    """How many operations of torch's each line calls per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGrowth:
    """What a program keeps of every step, in the training process."""

    name: str
    """Of the variable, as in "trainer.history"."""

    kind: str
    """Its type, as in "list"."""

    step_nbytes: int
    """By about how much it grew with each step."""

    steps: int
    """How many steps were looked at."""

    has_graph: bool
    """Whether tensors with the graphs that computed them are kept."""

    is_emptied: bool
    """Whether each epoch may begin with an empty one."""

    is_of_views: bool = False
    """Whether most of it is the rest of tensors of which a part is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStatement:
    """A statement of the step that calls something and drops what it returns, with all that passes beneath it."""

    hot: HotLine
    """Its first line; `calls` is what most of its time passes in."""

    lines: tuple[str, ...]
    """All of its lines."""

    calls: tuple[str, ...] = ()
    """All library functions that it, and what it calls of the program's own, was seen to call."""
