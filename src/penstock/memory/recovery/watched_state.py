"""WatchedState: what an attempt changes beside gradients and buffers, found out by looking, and put back.

Models carry hidden states over from batch to batch, count their calls, keep queues and moving averages, and draw from
generators of their own; loss functions keep metrics. To copy all of that before each window would cost too much. So the
first windows, and later ones ever more rarely, are compared with what was there before: objects by identity, tensors by
their version counters, parameters by their norms too (of what is changed through `.data`, no counter tells). What has
changed then is copied before each window from then on.

Looked into are the modules, what the loss function and the methods of layers refer to (closures, defaults, objects,
and the globals that they name), and the containers and tensors in them. Parameters that are changed in place in a
window that fails, without having been changed in one that succeeded, cannot be put back: `ChangedInPlaceError`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.core.errors import OptionError
from penstock.memory.recovery.state_tree import StateTree, refill
from penstock.memory.user_lines import is_packaged, is_users

_MOST_NBYTES = 16 << 20
"""A larger tensor beside the model is taken for data, and copied only when it was seen to change."""
_NORMED = (Tensor, nn.Parameter)
_version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]  # half of attrgetter's time


class ChangedInPlaceError(Exception):
    """A failed attempt has changed tensors in place that nobody had copied."""

    def __init__(self, text: str, tensors: Sequence[Tensor]) -> None:
        super().__init__(text)
        self.tensors = tensors


class WatchedState:
    """The state of a model and of a loss function, restored after a failed attempt.

    Args:
        model: whose attributes and parameters are watched.
        loss_fn: what it refers to is watched too.
        also: modules, whose parameters are copied before each window; generators; and objects with `state_dict` and
            `load_state_dict`.
        is_watching: whether to look for changes; else only `also` is restored.
        copies_params: whether parameters that change in place are copied from then on; else a failure is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        also: Sequence[Any],
        *,
        is_watching: bool,
        copies_params: bool = True,
    ) -> None:
        self._modules = [model, *(one for one in also if isinstance(one, nn.Module))]
        self._model = model
        self._names = list(_names_of(loss_fn))
        if is_watching:  # generators and counters beside the class of a layer
            for kind in {type(part) for module in self._modules for part in module.modules()}:
                for function in filter(inspect.isfunction, vars(kind).values()):
                    if not is_packaged(function.__code__.co_filename):
                        self._names += _names_of(function)
        self._objects = [_methods_of(one) for one in also if not isinstance(one, nn.Module)]
        self._is_watching = is_watching
        self._copies_params = copies_params
        self._params: list[Tensor] = []
        self._changing: list[Tensor] = [p for one in self._modules[1:] for p in one.parameters()]
        """What is copied before each window."""
        self._tensors = self._changing
        """What is copied before this one."""
        self._copies: list[Tensor] = []
        self._copied_versions: list[int] = []
        self._containers: list[Any] = []
        self._generators: list[_Access] = []
        self._is_saved = False
        self._windows = 0
        self._tree: StateTree | None = None
        self._tree_versions: list[int] = []
        self._norms: list[float] = []
        """Of the parameters that are not copied: what is changed through `.data` has no other version."""
        self._normed: list[Tensor] = []
        self._silent = {*map(id, self._changing)} - {*map(id, model.parameters())}
        """Parameters that may be changed so."""
        self._undo: list[Callable[[], object]] = []
        self._versions: list[int] = []

    def save(self) -> None:
        """Save what is known to change. May be called again after it has failed."""
        self._tree, self._is_saved = None, False
        self._tensors = self._changing
        if not self._is_watching:
            self._params = []
        elif self._windows & (self._windows - 1) == 0 and not any(map(is_lazy, self._model.parameters())):
            self._params = [p for one in self._modules for p in one.parameters()]
            self._tree = StateTree(*self._modules, *(get() for get, _ in self._names), only=nn.Module)
            self._tree_versions = list(map(_version, self._tree.tensors))
            copied = set(map(id, self._changing))
            self._normed = [p for p in self._params if self._copies_params and id(p) not in copied]
            self._norms = _norms_of(self._normed)
            self._generators = [(get, put) for get, put, _ in self._tree.generators]
            self._forget_unreachable(self._tree)
            candidates = [t for t in self._uncopied(self._tree) if not isinstance(t, nn.Parameter)]
            self._tensors = self._changing + [t for t in candidates if t.nbytes <= _MOST_NBYTES and _is_plain(t)]
        if self._tensors or self._copies:
            self._copy()
        self._undo = []
        if self._containers:
            self._undo += [
                functools.partial(refill, one, dict(one) if isinstance(one, dict) else list(one))
                for one in self._containers
            ]
        for accesses in (self._names, self._objects, self._generators):
            if accesses:
                self._undo += [functools.partial(put, get()) for get, put in accesses]
        self._versions = [*map(_version, self._params)]
        self._is_saved = True

    def _forget_unreachable(self, tree: StateTree) -> None:
        """Drop what has been replaced since, so that it is not kept alive."""
        reached = {*map(id, tree.tensors), *(id(one) for one, _ in tree.containers)}
        self._tensors = self._changing = [one for one in self._changing if id(one) in reached]
        self._containers = [one for one in self._containers if id(one) in reached]

    def learn(self) -> None:
        """Look at what a window without a failure has changed. If this fails, it has had no effect."""
        if self._tree is not None:
            silently = self._changed_silently()
            copied = zip(self._tensors, self._copies, self._copied_versions, strict=True)
            # batch norm updates its statistics without raising their version
            changed = [one for one, was, version in copied if one._version != version or not torch.equal(one, was)]
            others = self._changed_tensors(self._tree)
            changed += [one for one in others if self._copies_params or not isinstance(one, nn.Parameter)]
            self._silent.update(map(id, silently))
            seen = set(map(id, changed))
            changed += [one for one in silently if id(one) not in seen]
            known = set(map(id, (*self._containers, *self._changing)))
            held = self._tree.containers
            self._containers += [one for one, content in held if id(one) not in known and _differs(one, content)]
            self._tensors = self._changing = self._changing + [one for one in changed if id(one) not in known]
        self._tree = None
        self._windows += 1

    def restore(self) -> None:
        """Put back what was saved last. May be called again after it has failed.

        Raises:
            ChangedInPlaceError: a tensor was changed that had never been changed before.
        """
        if not self._is_saved:
            return
        with torch.no_grad():
            for tensor, own, version in zip(self._tensors, self._copies, self._copied_versions, strict=False):
                if tensor._version != version or not isinstance(tensor, nn.Parameter) or id(tensor) in self._silent:
                    tensor.copy_(own)
        if self._tree is not None:
            for container, held in self._tree.containers:
                if _differs(container, held):
                    refill(container, held)
        for undo in self._undo:
            undo()
        self._reject_changes()

    def discard(self) -> None:
        """Forget what was saved, so that `restore` does nothing."""
        self._tree, self._undo, self._versions, self._is_saved = None, [], [], False
        self._tensors = self._changing

    def free(self) -> None:
        """Forget what was saved, and free the copies, which are else kept for the next window."""
        self.discard()
        self._copies = []

    @torch.no_grad()
    def _copy(self) -> None:
        fitting = len(self._copies) == len(self._tensors)
        if not fitting or any(c.shape != t.shape for c, t in zip(self._copies, self._tensors, strict=True)):
            self._copies = []
            self._copies = [torch.empty_like(tensor, requires_grad=False) for tensor in self._tensors]
        if self._tensors:
            torch._foreach_copy_(self._copies, self._tensors)
        self._copied_versions = list(map(_version, self._tensors))

    def _changed_tensors(self, tree: StateTree) -> list[Tensor]:
        """Return what was changed in place and is copied by nobody."""
        versions = dict(zip(map(id, tree.tensors), self._tree_versions, strict=True))
        return [one for one in self._uncopied(tree) if one._version != versions[id(one)]]

    def _uncopied(self, tree: StateTree) -> list[Tensor]:
        """Return what is copied by nobody; gradients and buffers are others' business."""
        known = {id(one) for one in (*self._tensors, *(b for one in self._modules for b in one.buffers()))}
        known.update(id(grad) for _, grad in tree.gradients)
        return [one for one in tree.tensors if id(one) not in known]

    def _changed_silently(self) -> list[Tensor]:
        """Return the parameters with other values than before a window that is looked at."""
        norms = zip(self._normed, _norms_of(self._normed), self._norms, strict=True)
        return [p for p, now, was in norms if now != was and now == now]

    def _reject_changes(self) -> None:
        copied = set(map(id, self._tensors))
        versions = zip(self._params, self._versions, strict=True)
        changed = [p for p, version in versions if p._version != version and id(p) not in copied]
        if self._tree is not None:
            changed += self._changed_tensors(self._tree) + [p for p in self._changed_silently() if id(p) not in copied]
        if changed:
            params = {id(p): name for one in self._modules for name, p in one.named_parameters()}
            name = params.get(id(changed[0]), f"a tensor of shape {tuple(changed[0].shape)}")
            raise ChangedInPlaceError(
                f"the failed attempt had changed {name} in place, which nobody had copied, because no attempt before "
                "had done that; go back to a checkpoint, and pass the module that it belongs to in also=",
                changed,
            )


@torch.no_grad()
def _norms_of(params: Sequence[Tensor]) -> list[float]:
    """Return a norm of each, by an operation that needs no memory; 0 of what has none."""
    norms: dict[int, float] = {}
    plain = [p for p in params if type(p) in _NORMED and p.layout is torch.strided and p.device.type != "meta"]
    for dtypes in ((torch.float16, torch.bfloat16, torch.float32), (torch.float64,)):
        if group := [p for p in plain if p.dtype in dtypes]:
            found = torch._foreach_norm(group, 2, dtypes[-1])
            norms.update(zip(map(id, group), map(float, found), strict=True))
    return [norms.get(id(p), 0.0) for p in params]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be copied and written to as a whole."""
    return tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) != 1


def _differs(container: Any, held: Any) -> bool:
    if len(container) != len(held):
        return True
    if isinstance(container, dict):
        return not all(map(operator.is_, container.values(), held.values())) or list(container) != list(held)
    return not all(map(operator.is_, container, held))


_Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""What reads a value, and what puts it back."""


def _names_of(function: Any, depth: int = 3) -> Iterator[_Access]:
    """Yield all that a function refers to: its closure, its object, its arguments, and the globals that it names."""
    if isinstance(function, functools.partial):
        yield from _names_of(function.func, depth)
        yield (lambda: (function.args, function.keywords)), _keep
    elif isinstance(function, types.MethodType):
        owner = function.__self__
        yield (lambda: owner if isinstance(owner, nn.Module) else getattr(owner, "__dict__", None)), _keep
        yield from _names_of(function.__func__, depth)
    elif isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
        yield from _names_in(function, depth)
    elif callable(function) and not isinstance(function, (type, types.FunctionType)) and hasattr(function, "__dict__"):
        yield (lambda: function if isinstance(function, nn.Module) else function.__dict__), _keep


def _names_in(function: types.FunctionType, depth: int) -> Iterator[_Access]:
    """Yield what a function of the user's encloses, has for defaults, and names."""
    for cell in function.__closure__ or ():
        held = cell.cell_contents if _is_filled(cell) else None
        if not isinstance(held, (type, types.FunctionType)):
            yield functools.partial(_read_cell, cell), functools.partial(_write_cell, cell)
        if depth and held is not None:
            yield from _names_of(held, depth - 1)
    if defaults := (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield (lambda: defaults), _keep
        for held in defaults if depth else ():
            yield from _names_of(held, depth - 1)
    names = function.__globals__
    for name in function.__code__.co_names:
        if _is_watchable(names.get(name)):
            yield functools.partial(names.get, name), functools.partial(names.__setitem__, name)
        elif depth and isinstance(names.get(name), types.FunctionType):
            yield from _names_of(names[name], depth - 1)


def _is_watchable(value: Any) -> bool:
    """Return whether a global may be state of the loss function, and not a module or a class."""
    kinds = (
        int,
        float,
        list,
        dict,
        set,
        Tensor,
        nn.Module,
        torch.Generator,
        np.random.Generator,
        np.random.RandomState,
    )
    return isinstance(value, kinds)


def _methods_of(one: Any) -> _Access:
    if isinstance(one, torch.Generator):
        return one.get_state, one.set_state
    if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
        return (lambda: copy.deepcopy(one.state_dict())), (lambda state: one.load_state_dict(copy.deepcopy(state)))
    raise OptionError(
        f"also= takes modules, generators, and objects with state_dict and load_state_dict, not a {type(one).__name__}"
    )


def _keep(value: Any) -> None:
    """Put back nothing: a name that cannot be given another value."""


def _is_filled(cell: types.CellType) -> bool:
    try:
        return bool(cell.cell_contents is not None)
    except ValueError:
        return False


def _read_cell(cell: types.CellType) -> Any:
    return cell.cell_contents if _is_filled(cell) else None


def _write_cell(cell: types.CellType, value: Any) -> None:
    if value is not None:
        cell.cell_contents = value
