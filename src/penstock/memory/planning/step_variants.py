"""StepVariant and Plan: ways to run a training step, what each takes, and the one to choose."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from penstock.core.errors import OptionError
from penstock.core.units import size_text
from penstock.memory.accounting.byte_counter import Role
from penstock.memory.planning.activation_checkpointing import checkpoint_blocks

_NEIGHBOURS = 5
"""Rows of a plan that are shown, if not all are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepVariant:
    """One way to run a step, and what it takes."""

    micro_batch: int
    """Samples in a micro-batch."""

    parts: int
    """Micro-batches per step."""

    checkpoint: bool
    """Whether the blocks are checkpointed."""

    offload: bool
    """Whether the inputs of the blocks wait in host memory."""

    selective: bool = False
    """Whether checkpointed blocks keep the results of products, convolutions and attention."""

    peak_nbytes: int
    """The most device memory that the step holds."""

    bound_nbytes: int
    """The same, with an allowance for workspaces that cannot be counted."""

    by_role: dict[Role, int]
    """What the peak consists of at that moment."""

    static_nbytes: int
    """Bytes held all the time: weights, the optimizer's state, the batch."""

    backward_peak_nbytes: int
    """The most bytes held until the gradients are complete, before the optimizer steps."""

    extra_flops: float
    """Operations computed again, as a fraction of those of a plain step."""

    moved_nbytes: int
    """Bytes that go to the host and back."""

    slowdown: float
    """Estimated: time per step over that of a plain step. Not measured; see `plan`."""

    def describe(self) -> str:
        """Return the variant as text: "64 x 4, checkpointed"."""
        words = {
            "checkpointed": self.checkpoint and not self.selective,
            "selectively checkpointed": self.selective,
            "offloaded": self.offload,
        }
        more = [word for word, is_on in words.items() if is_on]
        parts = f" x {self.parts}" if self.parts > 1 else ""
        return ", ".join([f"{self.micro_batch}{parts}", *more])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The ways to run a step under a budget, and the one to choose."""

    budget_nbytes: int
    """The memory that the step may take."""

    variants: tuple[StepVariant, ...]
    """All that were predicted, the fastest first."""

    choice: StepVariant | None
    """The fastest that fits, with all that the prediction may be off; None if none does."""

    relative_error: float
    """How far the peaks may be off, as a fraction, if no operation takes a workspace that cannot be counted."""

    fragmentation: float = 0.0
    """What the allocator may hold beside the peak in pieces that no request fits into, as a fraction of it."""

    measured: str = ""
    """Why the step was measured on real tensors instead of predicted; empty if it was predicted."""

    verified: str = ""
    """The result of a measured step, or why there was none; empty if none was asked for."""

    warnings: tuple[str, ...] = field(default=())
    """What the figures leave out."""

    def apply(self, model: nn.Module) -> int:
        """Make `model` run as chosen, and return the micro-batch for `TrainStep(micro_batch=)`.

        Raises:
            OptionError: nothing fits.
        """
        if self.choice is None:
            raise OptionError(f"no variant of this step fits {size_text(self.budget_nbytes)}; {self._smallest_text()}")
        if self.choice.checkpoint:
            checkpoint_blocks(model, offload=self.choice.offload, selective=self.choice.selective)
        return self.choice.micro_batch

    def __str__(self) -> str:
        return self.render().rstrip()

    def render(self, *, every: bool = False) -> str:
        """Return the plan as text: the choice, or else what needs least, and its neighbours.

        Args:
            every: whether to show all variants.
        """
        head = f"{'micro-batch':32} {'peak':>10}  {'weights':>9} {'gradients':>9} {'optimizer':>9} {'activations':>11}"
        has_ranks = any(variant.by_role["communication"] for variant in self.variants)
        lines = [head + f" {'other':>9}{' communication' if has_ranks else ''} {'slower':>7}"]
        rows = self.variants if every else self._neighbours()
        for variant in rows:
            roles = variant.by_role
            other = roles["temporaries"] + roles["inputs"]
            shared = f" {size_text(roles['communication']):>13}" if has_ranks else ""
            cells = f"{size_text(roles['weights']):>9} {size_text(roles['gradients']):>9} "
            cells += f"{size_text(roles['optimizer']):>9} {size_text(roles['activations']):>11} "
            cells += f"{size_text(other):>9}{shared}"
            up_to = f"  to {size_text(variant.bound_nbytes)}" if variant.bound_nbytes > variant.peak_nbytes else ""
            fits = up_to + ("" if self.fits(variant) else "  does not fit")
            mark = ">" if variant is self.choice else " "
            peak = size_text(variant.peak_nbytes)
            lines.append(f"{mark} {variant.describe():30} {peak:>10}  {cells} {variant.slowdown:>6.2f}x{fits}")
        if len(rows) < len(self.variants):
            lines.append(f"  and {len(self.variants) - len(rows)} more ways: --all, or render(every=True)")
        how = "measured on real tensors" if self.measured else "predicted"
        budget = size_text(self.budget_nbytes)
        lines.append(f"budget {budget}; peaks {how}, to {self.relative_error:.0%}; slowdowns are estimates")
        if self.fragmentation:
            pieces = f"the allocator may hold {self.fragmentation:.0%} more in pieces that nothing fits into"
            lines.append(f"note: {pieces}; PYTORCH_ALLOC_CONF=expandable_segments:True saves that")
        lines += [f"note: {words}" for words in (self.measured, self.verified, *self.warnings) if words]
        if self.choice is None:
            return "\n".join([*lines, self._smallest_text(), *self._what_would_fit()]) + "\n"
        left = size_text(self.budget_nbytes - self.needed_nbytes(self.choice))
        lines.append(f"choose {self.choice.describe()}: {left} are left, beside what the prediction may be off")
        return "\n".join(lines) + "\n"

    def choose(self, variants: tuple[StepVariant, ...]) -> Plan:
        """Return the plan with these variants, and the fastest that fits as its choice."""
        ordered = tuple(sorted(variants, key=lambda variant: (variant.slowdown, variant.peak_nbytes)))
        return replace(self, variants=ordered, choice=next(filter(self.fits, ordered), None))

    def fits(self, variant: StepVariant) -> bool:
        """Return whether `variant` fits the budget, with all that the prediction may be off."""
        return self.needed_nbytes(variant) <= self.budget_nbytes

    def needed_nbytes(self, variant: StepVariant) -> int:
        """Return the most bytes `variant` may take, workspaces, `relative_error` and `fragmentation` included."""
        return int(variant.bound_nbytes * (1 + self.relative_error + self.fragmentation))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as data."""
        return asdict(self)

    def _neighbours(self) -> tuple[StepVariant, ...]:
        """Return the choice, the last ones that are faster and the first that are slower; or else what needs least."""
        if self.choice is None:
            return tuple(sorted(self.variants, key=self.needed_nbytes)[:_NEIGHBOURS])
        first = max(0, self.variants.index(self.choice) - _NEIGHBOURS // 2)
        return self.variants[first : first + _NEIGHBOURS]

    def _smallest_text(self) -> str:
        least = min(self.variants, key=self.needed_nbytes)
        needed = self.needed_nbytes(least)
        over = size_text(needed - self.budget_nbytes)
        return f"nothing fits: the least is {size_text(needed)}, with {least.describe()}, {over} too much"

    def _what_would_fit(self) -> list[str]:
        """Return what else would fit, reckoned from the roles of what needs least."""
        least = min(self.variants, key=self.needed_nbytes)
        roles = least.by_role
        model = roles["weights"] + roles["gradients"] + roles["optimizer"]
        most = self.budget_nbytes * least.peak_nbytes / self.needed_nbytes(least)
        peak, powers = least.peak_nbytes, (2, 4, 8, 16, 32, 64)
        ways = [
            ("bfloat16 in place of float32", peak // 2),
            ("training adapters only (LoRA)", peak - roles["gradients"] - roles["optimizer"]),
        ]
        shared = [(f"ranks={n}, that share the model", peak - model + model // n) for n in powers]
        shorter = [(f"inputs 1/{n} as long", peak - roles["activations"] + roles["activations"] // n) for n in powers]
        for several in ([] if roles["communication"] else shared), shorter:
            ways += [way for way in several if way[1] <= most][:1]
        found = [f"{words}: about {size_text(nbytes)}" for words, nbytes in ways if nbytes <= most]
        return [f"what would fit, roughly: {'; '.join(found)}"] if found else []
