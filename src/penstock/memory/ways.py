"""Ways to run a training step, what each takes, and the one to choose."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.core.units import size_text
from penstock.memory.blocks import checkpoint_blocks
from penstock.memory.counting import Role
from penstock.memory.state_offload import offload_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run a step, and what it takes."""

    micro_batch: int
    """Samples at once."""

    parts: int
    """Micro-batches per step."""

    checkpoint: bool
    """Whether the blocks are checkpointed."""

    offload: bool
    """Whether the inputs of the blocks wait in host memory."""

    offload_state: bool = False
    """Whether the optimizer's state waits in host memory while gradients are computed."""

    peak_nbytes: int
    """The most device memory that the step holds."""

    by_role: dict[Role, int]
    """What it consists of at that moment."""

    held_nbytes: int
    """What is there all the time: weights, the optimizer's state, the batch."""

    gather_nbytes: int
    """The most that is held until the gradients are there, before the optimizer steps."""

    extra_flops: float
    """Operations computed again, as a share of those of a plain step."""

    moved_nbytes: int
    """Bytes that go to the host and back."""

    slow_down: float
    """Estimated: time per step over that of a plain step. Not measured; see `plan`."""

    def settings(self) -> str:
        """Return the way in words."""
        words = {"checkpointed": self.checkpoint, "offloaded": self.offload, "state offloaded": self.offload_state}
        more = [word for word, is_on in words.items() if is_on]
        parts = f" x {self.parts}" if self.parts > 1 else ""
        return ", ".join([f"{self.micro_batch}{parts}", *more])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The ways to run a step under a budget, and the one to choose."""

    budget_nbytes: int
    """What there is."""

    ways: tuple[Way, ...]
    """All that were looked at, the fastest first."""

    choice: Way | None
    """The fastest that fits, its error bar included; None when none does."""

    error: float
    """How far the peaks may be off, as a share."""

    measured: str = ""
    """Why tensors were real and not fake, if they were."""

    verified: str = ""
    """What a measured step said, where there was one, or why there was none."""

    warnings: tuple[str, ...] = field(default=())
    """What the figures do not see."""

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> int:
        """Make `model` and `optimizer` run as chosen, and return the micro-batch for `TrainStep(micro_batch=)`.

        Raises:
            OptionError: nothing fits, or the optimizer is lacking whose state is to be offloaded.
        """
        if self.choice is None:
            raise OptionError(f"no way to run this step fits {size_text(self.budget_nbytes)}; {self._least_words()}")
        if self.choice.offload_state:
            if optimizer is None:
                raise OptionError("the choice offloads the optimizer's state: call plan.apply(model, optimizer)")
            offload_state(optimizer)
        if self.choice.checkpoint:
            checkpoint_blocks(model, offload=self.choice.offload)
        return self.choice.micro_batch

    def render(self) -> str:
        """Return the plan as text."""
        head = f"{'micro-batch':50} {'peak':>10}  {'weights':>9} {'gradients':>9} {'optimizer':>9} {'activations':>11}"
        lines = [head + f" {'other':>9} {'slower':>7}"]
        for way in self.ways:
            roles = way.by_role
            other = roles["temporaries"] + roles["inputs"]
            cells = f"{size_text(roles['weights']):>9} {size_text(roles['gradients']):>9} "
            cells += f"{size_text(roles['optimizer']):>9} {size_text(roles['activations']):>11} {size_text(other):>9}"
            fits = "" if self.fits(way) else "  does not fit"
            mark = ">" if way is self.choice else " "
            lines.append(
                f"{mark} {way.settings():48} {size_text(way.peak_nbytes):>10}  {cells} {way.slow_down:>6.2f}x{fits}"
            )
        how = "measured on real tensors" if self.measured else "predicted"
        lines.append(
            f"budget {size_text(self.budget_nbytes)}; peaks {how}, to {self.error:.0%}; slow-downs are estimates"
        )
        lines += [f"note: {words}" for words in (self.measured, self.verified, *self.warnings) if words]
        lines.append(self._least_words() if self.choice is None else f"choose {self.choice.settings()}")
        return "\n".join(lines) + "\n"

    def chosen(self, ways: tuple[Way, ...]) -> Plan:
        """Return the plan with other ways, and the fastest that fits as its choice."""
        ordered = tuple(sorted(ways, key=lambda way: (way.slow_down, way.peak_nbytes)))
        return replace(self, ways=ordered, choice=next(filter(self.fits, ordered), None))

    def fits(self, way: Way) -> bool:
        """Return whether `way` fits the budget, its error bar included."""
        return way.peak_nbytes * (1 + self.error) <= self.budget_nbytes

    def to_json(self) -> dict[str, Any]:
        """Return it as data."""
        return asdict(self)

    def _least_words(self) -> str:
        least = min(self.ways, key=lambda way: way.peak_nbytes)
        needed = int(least.peak_nbytes * (1 + self.error))
        return f"nothing fits: the least is {size_text(needed)}, with {least.settings()}"
