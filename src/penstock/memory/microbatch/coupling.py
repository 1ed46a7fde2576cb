"""Operations that couple the samples of a batch, observed while a loss is computed, with the line that asked for them.

Random numbers are replaced by their means meanwhile (a dropout keeps everything), so that two ways to compute the same
loss can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.memory.recovery.random_state import RandomState
from penstock.memory.user_lines import users_line_now

_MEANS = {"normal_": 0.0, "uniform_": 0.5, "exponential_": 1.0, "rand": 0.5, "rand_like": 0.5, "randn": 0.0}
_MEANS |= {"randn_like": 0.0}
_REPLACED = frozenset((*_MEANS, "bernoulli", "bernoulli_", "native_dropout"))
_REDUCTIONS = frozenset(
    ("mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "logsumexp", "cumsum")
) | frozenset(("_softmax", "_log_softmax", "sort", "topk", "norm", "linalg_vector_norm"))
_BATCH_NORMS = frozenset(("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "batch_norm"))
_EXCHANGES = frozenset(("flip", "roll", "index", "index_select", "gather", "topk", "sort"))
_MEAN_LOSSES = frozenset(
    (
        "mean",
        "nll_loss_forward",
        "nll_loss2d_forward",
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
    )
)


class CouplingObserver(TorchDispatchMode):
    """Notes, for each kind of coupling, the line where it was seen first.

    Args:
        size: samples in the batch; a tensor whose first dimension is that, or a multiple, is taken to have them there.
        devices: accelerators that random numbers may be drawn on.
    """

    def __init__(self, size: int, devices: Sequence[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, str] = {}
        """The line, by "batch norm", "pairs", "reduction", "mean" and "exchange"."""
        self.dtypes: set[torch.dtype] = set()
        """The types that were computed in, also under an autocast that is inside of the model."""
        self.is_observing = True
        self.has_drawn = False
        """Whether random numbers were drawn that are not replaced: permutations, say."""
        self._size = size
        self._devices = devices

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        before = None
        if torch.Tag.nondeterministic_seeded in func.tags and name not in _REPLACED:
            before = RandomState.now(self._devices)
        result = _without_chance(name, func, args, kwargs)
        if before is not None and before != RandomState.now(self._devices):
            self.has_drawn = True
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
        kind = self._kind_of(name, args, kwargs, result) if self.is_observing else ""
        if kind and kind not in self.seen:
            self.seen[kind] = users_line_now()
        return result

    def _kind_of(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> str:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.ndim:
            return ""
        if name in _BATCH_NORMS and first.shape[0] % self._size == 0 and any(arg is True for arg in args[5:8]):
            return "batch norm"
        is_square = isinstance(result, Tensor) and tuple(result.shape) == (self._size, self._size)
        if is_square and tuple(first.shape) != tuple(result.shape):
            return "pairs"
        if name in _REDUCTIONS and first.ndim > 1 and first.shape[0] % self._size == 0:
            dims = args[1] if len(args) > 1 else kwargs.get("dim")
            if dims == 0 or (isinstance(dims, (list, tuple)) and list(dims)[:1] == [0]):
                return "reduction"
        if name in _MEAN_LOSSES and isinstance(result, (Tensor, tuple)) and _is_mean(name, args):
            return "mean"
        return "exchange" if name in _EXCHANGES and first.shape[0] == self._size else ""


def _is_mean(name: str, args: tuple[Any, ...]) -> bool:
    if name == "mean":
        return len(args) == 1
    return (name in ("mse_loss", "smooth_l1_loss", "huber_loss") and len(args) < 3) or 1 in [
        arg for arg in args[2:] if type(arg) is int
    ]


def _without_chance(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if name == "bernoulli_":
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        result.copy_(chance) if isinstance(chance, Tensor) else result.fill_(chance)
    elif name == "bernoulli":
        result.copy_(args[0])
    elif name == "native_dropout":
        result[0].copy_(args[0])
        result[1].fill_(True)
    elif name in _MEANS:
        result.fill_(_MEANS[name])
    return result


def lowest_epsilon(dtypes: Iterable[torch.dtype]) -> float:
    """Return the rounding error of the coarsest of some floating-point types."""
    return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=2.0**-23)
