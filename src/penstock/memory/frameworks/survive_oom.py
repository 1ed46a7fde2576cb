"""survive_oom: lets a Trainer of Hugging Face's or Lightning's survive out-of-memory."""

from __future__ import annotations

from typing import Any, TypeVar

from penstock.core.errors import OptionError
from penstock.memory.frameworks.hf_trainer import guard_hf_trainer
from penstock.memory.frameworks.lightning_trainer import guard_lightning_trainer

T = TypeVar("T")


def survive_oom(trainer: T, **options: Any) -> T:
    """Let each batch of a Trainer, and each step of its optimizer, survive out-of-memory with the same gradients.

    A batch that runs out of memory is run once more, and then in parts, as by `BackwardStep`. All else is the
    framework's: its loss, accumulation, mixed precision, clipping, logs and checkpoints.

    Args:
        trainer: a `transformers.Trainer` (or one of its descendants, as TRL's), or a `lightning.Trainer` whose module
            optimizes automatically; in one process, on one device.
        options: those of `BackwardStep`: `weight`, `micro_batch`, `split`, `batch_size`, `batch_dims`, `also`,
            `allow_batch_dependent`.

    Returns:
        The trainer.

    Raises:
        OptionError: it is another one, or it trains in a way that cannot be put back after a failure.

    Example, with `lightning.Trainer(...)`:
        `penstock.survive_oom(trainer).fit(module, loader)`
    """
    if hasattr(trainer, "fit_loop"):
        guard_lightning_trainer(trainer, options)
    elif hasattr(trainer, "training_step") and hasattr(trainer, "accelerator"):
        guard_hf_trainer(trainer, options)
    else:
        raise OptionError(
            f"survive_oom takes a Trainer of transformers or Lightning, not a {type(trainer).__name__}; in a loop of "
            "your own, use BackwardStep"
        )
    return trainer
