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
from torch.utils._pytree import tree_leaves

from penstock.memory.model_tensors import storage_key
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.user_lines import users_line_now

_MEANS = {"normal_": 0.0, "uniform_": 0.5, "exponential_": 1.0, "rand": 0.5, "rand_like": 0.5, "randn": 0.0}
_MEANS |= {"randn_like": 0.0}
_REPLACED = frozenset((*_MEANS, "bernoulli", "bernoulli_", "native_dropout"))
_REDUCTIONS = frozenset(
    ("mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "logsumexp", "cumsum")
) | frozenset(("_softmax", "_log_softmax", "sort", "topk", "norm", "linalg_vector_norm"))
_ALONG = frozenset(("cumsum", "cumprod", "logcumsumexp", "logsumexp", "_softmax", "_log_softmax"))
"""What couples samples also where there is one number of each."""
_COUNTS = frozenset(("bincount", "histc", "histogram", "_unique2", "unique_dim"))
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
        params: of the model.
    """

    def __init__(self, size: int, devices: Sequence[torch.device], params: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, str] = {}
        """The line, by "batch norm", "pairs", "reduction", "statistic", "ratio", "mean", "penalty" and "exchange"."""
        self.dtypes: set[torch.dtype] = set()
        """The types that were computed in, also under an autocast that is inside of the model."""
        self.is_observing = True
        self.has_drawn = False
        """Whether random numbers were drawn that are not replaced: permutations, say."""
        self._size = size
        self._devices = devices
        self._of_weights = {storage_key(one): one for one in params}
        """Parameters, and what is computed from them alone; kept alive, so that no other gets their key."""
        self._totals: dict[int, Tensor] = {}
        """Single numbers that were computed from the samples."""

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
        if self.is_observing:
            of_number = self._kind_of_number(name, args, result)  # which also notes what is computed from what
            kind = self._kind_of(name, args, kwargs, result) or of_number
            if kind and kind not in self.seen:
                self.seen[kind] = users_line_now()
        return result

    def _kind_of(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> str:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.ndim:
            return ""
        is_part = first.shape[0] > 1 and self._size % first.shape[0] == 0
        if name in _BATCH_NORMS and (is_part or self._has_rows(first)) and any(arg is True for arg in args[5:8]):
            return "batch norm"
        is_square = isinstance(result, Tensor) and tuple(result.shape) == (self._size, self._size)
        if is_square and tuple(first.shape) != tuple(result.shape):
            return "pairs"
        if name in _COUNTS and self._has_rows(first):
            return "reduction"
        if name == "mm" and first.shape[1] == self._size and not self._has_rows(first):
            return "reduction"  # a product that sums over samples
        if name in _REDUCTIONS | _ALONG and (is_part or self._has_rows(first)):
            dims = args[1] if len(args) > 1 else kwargs.get("dim")
            is_first = dims == 0 or (isinstance(dims, (list, tuple)) and list(dims)[:1] == [0])
            if is_first and (name in _ALONG if first.ndim == 1 else storage_key(first) not in self._of_weights):
                return "reduction"
        if name in _MEAN_LOSSES and isinstance(result, (Tensor, tuple)) and _is_mean(name, args):
            return "mean"
        return "exchange" if name in _EXCHANGES and first.shape[0] == self._size else ""

    def _has_rows(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] > 0 and tensor.shape[0] % self._size == 0

    def _kind_of_number(self, name: str, args: tuple[Any, ...], result: Any) -> str:
        """Follow single numbers: of all samples, and of weights alone."""
        tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        weights = [storage_key(one) in self._of_weights for one in tensors]
        totals = [one.ndim == 0 and storage_key(one) in self._totals for one in tensors]
        if tensors and all(weights):
            self._of_weights.update((storage_key(one), one) for one in made)
            return ""
        rows = [self._has_rows(one) and not is_weight for one, is_weight in zip(tensors, weights, strict=True)]
        if any(rows) or any(totals):
            self._totals.update((storage_key(one), one) for one in made if one.ndim == 0)
        if name == "div" and totals[:1] == [True]:
            if all(totals) and len(totals) > 1:
                return "ratio"
            return "mean" if len(tensors) == 1 and self._size in args[1:] else ""
        if any(totals) and any(rows):
            return "statistic"
        is_sum = name == "add" and all(one.ndim == 0 for one in tensors)
        return "penalty" if is_sum and any(totals) and any(weights) else ""


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
