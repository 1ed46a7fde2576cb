"""Snapshot: what an attempt changes, saved before it and put back after it has failed.

**Gradients** that a training step adds to without using them belong to parameters that are in none of its optimizers: a
head that another optimizer steps later, or parameters that only the loss function knows, which are found once, in the
graph of a loss. **Buffers** are copied each time. **Attributes**: models carry hidden states from batch to batch, count
their calls, keep queues and moving averages, and draw from generators of their own. To copy all of that would cost too
much. So the first windows, and later ones ever more rarely, are compared with what was there before: objects by
identity, tensors by their version counters, parameters by their norms too (of what is changed through `.data`, no
counter tells). What has changed then is copied before each window from then on. Parameters that are changed in place in
a window that fails, without having been changed in one that succeeded, cannot be put back: `ChangedInPlaceError`.
**Outside** of the modules nothing is put back but what `also=` names; the rest is named (`outside_names.py`).
"""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.distributed.rank_group import local_tensor
from penstock.memory.model_tensors import accelerators_of
from penstock.memory.recovery.outside_names import OutsideNames
from penstock.memory.recovery.random_state import HostDraws, RandomState
from penstock.memory.recovery.state_tree import StateTree, differs, refill


class SavedGradients:
    """The gradients of all parameters of some modules, with or without those that an optimizer steps.

    Args:
        modules: whose parameters are meant.
        optimizer: whose parameters are meant too with `with_stepped`, and are not meant without it.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: Optimizer | None, *, with_stepped: bool) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._with_stepped = with_stepped
        self._params: list[Tensor] | None = None
        self._leaves: list[weakref.ref[Tensor]] = []
        self._saved: list[tuple[Tensor, Tensor, Tensor]] = []
        """A parameter, its gradient, and a copy of that."""
        self._is_saved = False
        self.looks_at_graph = True
        """Whether `find_in_graph` should be called with the next loss."""

    def save(self) -> None:
        """Copy those that there are; mostly there are none. May be called again after it has failed."""
        if self._params is None:
            self._params = list(self._meant())
        self._saved = []  # freed first: there may be no room for both
        if self._params or self._leaves:
            self._save([*self._params, *(leaf for one in self._leaves if (leaf := one()) is not None)])
        self._is_saved = True

    def discard(self) -> None:
        """Free the copies, so that `restore` does nothing."""
        self._saved, self._is_saved = [], False

    def find_in_graph(self, loss: Tensor) -> None:
        """Find further parameters in the graph of a loss, before its backward."""
        known = {id(p) for p in (*self._stepped(), *(self._params or ()))}
        found = [leaf for leaf in _leaves_of(loss) if id(leaf) not in known]
        self._save(found)
        self._leaves = [weakref.ref(leaf) for leaf in found]
        self.looks_at_graph = False

    @torch.no_grad()
    def restore(self) -> None:
        """Restore those that were saved last, and drop those that have come since. May be called again."""
        if not self._is_saved:
            return
        for param in self._meant():
            param.grad = None
        for reference in self._leaves:
            if (leaf := reference()) is not None:
                leaf.grad = None
        for param, grad, saved in self._saved:
            if grad.layout is torch.strided:
                local_tensor(grad).copy_(local_tensor(saved))
                param.grad = grad
            else:
                param.grad = saved.clone()

    def _save(self, params: Iterable[Tensor]) -> None:
        self._saved += [(p, p.grad, p.grad.detach().clone()) for p in params if p.grad is not None]

    def _stepped(self) -> list[Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [param for group in groups for param in group["params"]]

    def _meant(self) -> Iterator[Tensor]:
        stepped = self._stepped()
        every: dict[int, Tensor] = {id(p): p for module in self._modules for p in module.parameters()}
        for param in stepped:
            if self._with_stepped:
                every[id(param)] = param
            else:
                every.pop(id(param), None)
        return iter(every.values())


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradients the backward of `loss` adds to."""
    left: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        left += [follower for follower, _ in node.next_functions]


_buffers_of = operator.attrgetter("_buffers")
_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")


class SavedBuffers:
    """The buffers of modules (running statistics and the like), saved and restored.

    The copies are allocated by the first `save` and kept for the next. A buffer that a module has replaced by another
    tensor is restored as the object that it was; one that a module has added since is removed.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = [part for module in modules for part in module.modules()]
        self._held: list[Any] = []
        """The names and buffers of all modules when they were last walked: while they are the same, so is the rest."""
        self._by_module: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._saved_forms: tuple[list[torch.Size], list[torch.dtype]] = [], []
        self._is_saved = False

    def save(self) -> None:
        """Copy them. May be called again after it has failed."""
        self._is_saved = False
        dicts = [*filter(None, map(_buffers_of, self._modules))]  # most modules have none
        held = [*chain.from_iterable(dicts), *chain.from_iterable(map(dict.values, dicts))]
        is_same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if not is_same or (held and self._forms() != self._saved_forms):  # one may be resized in place
            self._walk(held)
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)
        self._is_saved = True

    def discard(self) -> None:
        """Forget what was saved, so that `restore` does nothing."""
        self._is_saved = False

    def restore(self) -> None:
        """Restore what was saved last. May be called again after it has failed."""
        if not self._is_saved:
            return
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._copies)
        for module, buffers in self._by_module:
            module._buffers.clear()
            module._buffers.update(buffers)

    def _walk(self, held: list[Any]) -> None:
        self._held = []
        by_module = [(module, dict(module._buffers)) for module in self._modules]
        self._buffers = [buffer for _, buffers in by_module for buffer in buffers.values() if buffer is not None]
        self._copies = []  # freed first: there may be no room for both
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
        self._by_module, self._saved_forms, self._held = by_module, self._forms(), held

    def _forms(self) -> tuple[list[torch.Size], list[torch.dtype]]:
        return [*map(_shape_of, self._buffers)], [*map(_dtype_of, self._buffers)]


_MOST_NBYTES = 16 << 20
"""A larger tensor beside the model is taken for data, and copied only when it was seen to change."""
_NORMED = (Tensor, nn.Parameter)
_version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]  # half of attrgetter's time


class ChangedInPlaceError(Exception):
    """A failed attempt has changed tensors in place that nobody had copied."""


class WatchedState:
    """What modules keep beside parameters' gradients and buffers, restored after a failed attempt.

    Args:
        modules: the model, and the modules of `also`. The parameters of the latter are copied before each window.
        objects: generators, and objects with `state_dict` and `load_state_dict`.
        is_watching: whether to look for changes; else only what was named is restored.
        copies_params: whether parameters that change in place are copied from then on; else a failure is an error.
        copies_all: whether the model's parameters are copied before each window, too.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        objects: Sequence[Any] = (),
        *,
        is_watching: bool = True,
        copies_params: bool = True,
        copies_all: bool = False,
    ) -> None:
        self._modules = modules
        self._objects = [_methods_of(one) for one in objects]
        self._is_watching = is_watching
        self._copies_params = copies_params
        self._params: list[Tensor] = []
        self._changing: list[Tensor] = [p for one in modules[0 if copies_all else 1 :] for p in one.parameters()]
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
        self._norms: list[float] = []
        """Of the parameters that are not copied: what is changed through `.data` has no other version."""
        self._normed: list[Tensor] = []
        self._silent = {*map(id, self._changing)} - {*map(id, modules[0].parameters())}
        """Parameters that may be changed so."""
        self._undo: list[Callable[[], object]] = []
        self._versions: list[int] = []

    @property
    def looks_next(self) -> bool:
        """Whether the next window is compared with what was there before it."""
        return self._is_watching and self._windows & (self._windows - 1) == 0

    def save(self) -> None:
        """Save what is known to change. May be called again after it has failed."""
        self._tree, self._is_saved = None, False
        self._tensors = self._changing
        if not self._is_watching:
            self._params = []
        elif self.looks_next and not any(map(is_lazy, self._modules[0].parameters())):
            self._params = [p for one in self._modules for p in one.parameters()]
            self._tree = StateTree(*self._modules, only=nn.Module)
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
        for accesses in (self._objects, self._generators):
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
            self._containers += [one for one, content in held if id(one) not in known and differs(one, content)]
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
                if differs(container, held):
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
        versions = dict(zip(map(id, tree.tensors), tree.versions, strict=True))
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
                "had done that; go back to a checkpoint, and pass the module that it belongs to in also="
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


_Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""What reads a value, and what puts it back."""


def _methods_of(one: Any) -> _Access:
    if isinstance(one, torch.Generator):
        return one.get_state, one.set_state
    if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
        return (lambda: copy.deepcopy(one.state_dict())), (lambda state: one.load_state_dict(copy.deepcopy(state)))
    raise OptionError(
        f"also= takes modules, generators, and objects with state_dict and load_state_dict, not a {type(one).__name__}"
    )


class Snapshot:
    """All that an attempt changes, saved before it and restored after it has failed.

    Args:
        model: whose gradients, buffers and attributes are restored.
        optimizer: whose parameters' gradients are meant too with `with_stepped`, and are not meant without it.
        also: modules, generators, and objects with `state_dict` and `load_state_dict`, which are restored too.
        loss_fn: what it refers to by itself is not restored; a warning names what changes.
        with_stepped: see `optimizer`; None where gradients are left alone.
        is_watching: whether to look for changes of what modules keep beside buffers.
        copies_params: whether parameters that change in place are copied from then on; else a failure is an error.
        copies_all: whether the model's parameters are copied, each time.
        warned: the names that were warned of, to share with another snapshot.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        also: Sequence[Any],
        loss_fn: Callable[..., Any] | None = None,
        *,
        with_stepped: bool | None = True,
        is_watching: bool = True,
        copies_params: bool = True,
        copies_all: bool = False,
        warned: set[str] | None = None,
    ) -> None:
        self.modules = [model, *(one for one in also if isinstance(one, nn.Module))]
        """The model, and what else losses are computed with."""
        self.devices = accelerators_of(model)
        self._gradients = (
            None if with_stepped is None else SavedGradients(self.modules, optimizer, with_stepped=with_stepped)
        )
        self._buffers = SavedBuffers(*self.modules)
        self._watched = WatchedState(
            self.modules,
            [one for one in also if not isinstance(one, nn.Module)],
            is_watching=is_watching,
            copies_params=copies_params,
            copies_all=copies_all,
        )
        self._outside = OutsideNames(loss_fn, self.modules, warned) if is_watching else None
        self._before: RandomState | None = None
        self._draws = HostDraws()

    def named(self, method: str) -> dict[str, Tensor]:
        """Return the parameters ("named_parameters") or buffers ("named_buffers") of all modules by name."""
        found: dict[str, Tensor] = {}
        for number, module in enumerate(self.modules):
            found.update(getattr(module, method)(prefix=f"also[{number - 1}]" if number else ""))
        return found

    def random_state(self) -> RandomState:
        """Return the random states that there are now, as far as windows draw from them."""
        return RandomState.now(self.devices, reads_host=self._draws.are_read)

    def save(self, before: RandomState | None = None) -> None:
        """Save all of it, with random states that were taken before. May be called again after it has failed."""
        if self._gradients is not None:
            self._gradients.save()
        self._buffers.save()
        if self._outside is not None and self._watched.looks_next:
            self._outside.save()
        self._watched.save()
        self._before = before or self.random_state()

    def find_in_graph(self, loss: Tensor) -> None:
        """Find parameters that only the loss function knows, before the first backward."""
        if self._gradients is not None and self._gradients.looks_at_graph:
            self._gradients.find_in_graph(loss)

    def restore(self) -> None:
        """Restore what was saved last. May be called again after it has failed.

        Raises:
            ChangedInPlaceError: a tensor was changed that had never been changed before. All else is restored.
        """
        if self._gradients is not None:
            self._gradients.restore()
        self._buffers.restore()
        if self._before is not None:
            self._before.restore()
        try:
            self._watched.restore()
        finally:
            if self._outside is not None:
                self._outside.warn_of_changes()

    def learn(self) -> None:
        """Look at what a window without a failure has changed. If this fails, it has had no effect."""
        if self._outside is not None:
            self._outside.learn()
        self._watched.learn()
        if self._before is not None:
            self._draws.look(self._before, self.devices)

    def discard(self) -> None:
        """Forget what was saved, so that `restore` does nothing; free the copies of gradients."""
        if self._gradients is not None:
            self._gradients.discard()
        self._buffers.discard()
        self._watched.discard()
        self._before = None

    def free(self) -> None:
        """Forget what was saved, and free all copies, of which some are else kept for the next window."""
        self.discard()
        self._watched.free()
