"""ForeignStep: a step of an optimizer that is not torch's. One that fails is undone, or done to its end.

**Copied**: the step runs from a copy of all that can be reached from the optimizer, and is undone if it fails. That
takes as much memory again as parameters, gradients and moments, and the time to read and write them. Where the device
has no room for the copies, they are made on the host. **As it is**: the step runs without a copy, and one that fails is
resumed from where it failed (`resume_optimizer.py`), if version counters show all that such a step changes.

The first steps are copied, and show what changes. From then on they run as they are, but only until memory has run out
anywhere in the training step, in forward or backward too: from then on all are copied. So what may be refused
(`PartialStepError`, and never weights that are wrong without a word) is a failure that comes out of the blue, in the
middle of a step that cannot be resumed, and only once. Steps are copied in any case where an accelerator has no room
for the temporaries of a step, and while a dispatch mode sees their operations; and those that are like no step before,
until eight in a row were.
"""

from __future__ import annotations

import contextlib
import operator
import traceback
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.device.oom import is_out_of_memory
from penstock.memory.model_tensors import storage_key
from penstock.memory.optimizer.optimizer_state import (
    has_room,
    has_step_hooks,
    nbytes_by_accelerator,
    step_without_hooks,
)
from penstock.memory.optimizer.resume_optimizer import PartialStepError, StepResumption
from penstock.memory.recovery.out_of_memory import (
    Failure,
    FailureLog,
    RetryOps,
    attempt,
    clear_frames,
    free_memory,
    retry,
)
from penstock.memory.recovery.random_state import HostDraws, RandomState
from penstock.memory.recovery.state_tree import StateTree, is_leaf, refill

_MOST_TRIES = 8
"""Steps in a row before each of which the optimizer was another one than before, until it is copied no more."""
_MOST_KINDS = 64
"""Kinds of steps (which parameters have gradients) that are remembered, as of a model with experts."""
_LOOKS = 2
"""Steps of a kind that are looked at."""
_HOST = torch.device("cpu")

_class: Any = Tensor
_grad_of, _version, _is_sparse = _class.grad.__get__, _class._version.__get__, _class.is_sparse.__get__


@dataclass(slots=True)
class _StepKind:
    """Steps with gradients of the same parameters."""

    seen: int = 0
    """How many of them were copied: changes of the first are counted by versions, those of the second by operations."""
    changes: list[int] | None = None
    """How often a step changes each tensor; None where version counters do not show all changes."""


@dataclass(frozen=True, slots=True)
class _BegunStep:
    """What there was before a step."""

    kind: _StepKind
    tensors: list[Tensor]
    """All that it may change in place: parameters, moments and gradients."""
    versions: list[int]
    places: list[int]
    """Where their data is."""
    contents: list[Any]
    """Copies of all containers."""
    grads: list[Tensor | None]
    generators: list[Any]
    random: RandomState

    def changes(self) -> list[int]:
        """Return how often each tensor has been changed since."""
        return [*map(operator.sub, map(_version, self.tensors), self.versions)]

    def has_moved(self) -> bool:
        """Return whether the data of a tensor has been replaced since."""
        return self.places != [*map(Tensor.data_ptr, self.tensors)]


class _KnownOptimizer:
    """What an optimizer consists of, compared at once with what it was before, by functions that are C.

    Args:
        tree: of it, before a step.
    """

    def __init__(self, tree: StateTree) -> None:
        self._leaves = [leaf for leaf, _ in tree.gradients]
        grads = {id(grad) for _, grad in tree.gradients}
        self._tensors = [one for one in tree.tensors if id(one) not in grads]
        self._dicts = [one for one, _ in tree.containers if isinstance(one, dict)]
        self._others = [one for one, _ in tree.containers if not isinstance(one, dict)]
        self._generators = [(get, put) for get, put, _ in tree.generators]
        self.devices = {one.device for one in self._tensors if one.device.type not in ("cpu", "meta")}
        every = [*self._leaves, *(grad for _, grad in tree.gradients if grad is not None), *tree.tensors]
        self.is_plain = not tree.unknown and not tree.has_slots and all(map(_is_plain, every))
        """Whether it can be compared and put back in this way at all."""
        contents, flat = self._look()
        self._sizes = [*map(len, contents)]
        self._types = [*map(type, flat)]
        self._selected = [not is_leaf(kind) for kind in self._types]
        self._held = [*compress(flat, self._selected)]
        """All that has content of its own; what has none, numbers say, may change from step to step."""
        self._kinds: dict[bytes, _StepKind] = {}

    def begin(self, *, reads_host: bool) -> _BegunStep | None:
        """Return what there is before a step; None if it is not what there was when the step became known."""
        contents, flat = self._look()
        if self._sizes != [*map(len, contents)] or self._types != [*map(type, flat)]:
            return None
        if not all(map(operator.is_, compress(flat, self._selected), self._held)):
            return None
        grads = [*map(_grad_of, self._leaves)]
        present = [*compress(grads, map(operator.is_not, grads, repeat(None)))]
        if any(map(_is_sparse, present)):
            return None
        key = bytes(map(operator.is_, grads, repeat(None)))
        if key not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            return None
        kind = self._kinds.setdefault(key, _StepKind())
        tensors = self._tensors + present
        places, generators = [*map(Tensor.data_ptr, tensors)], [get() for get, _ in self._generators]
        random = RandomState.now(self.devices, reads_host=reads_host)
        return _BegunStep(kind, tensors, [*map(_version, tensors)], places, contents, grads, generators, random)

    def put_back(self, begun: _BegunStep) -> None:
        """Put back all but the values of tensors."""
        for container, content in zip((*self._dicts, *self._others), begun.contents, strict=True):
            refill(container, content)
        for leaf, grad in zip(self._leaves, begun.grads, strict=True):
            leaf.grad = grad
        for (_, put), state in zip(self._generators, begun.generators, strict=True):
            put(state)
        begun.random.restore()

    def _look(self) -> tuple[list[Any], list[Any]]:
        """Return copies of all containers, and all that they hold."""
        dicts, others = [*map(dict, self._dicts)], [*map(list, self._others)]
        return [*dicts, *others], [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(others)]


class ForeignStep:
    """Steps `optimizer`. Random numbers are drawn again as the first time.

    Args:
        optimizer: not torch's.
        log: records every failure that was survived in here.
    """

    def __init__(self, optimizer: Optimizer, log: FailureLog) -> None:
        self._optimizer = optimizer
        self._log = log
        self._copies: list[Tensor] = []
        self._known: _KnownOptimizer | None = None
        self._draws = HostDraws()
        self._tries_left = _MOST_TRIES
        self._needed: dict[torch.device, int] = {}
        """Bytes that the temporaries of a step may take."""
        self._is_careful = False
        """Whether a step has failed before."""
        self._interrupted: tuple[_BegunStep | None, list[int]] = None, []
        """What was interrupted by something else than memory, and the versions of what it changes."""
        self._is_lost = False
        """Whether a step was begun that has neither ended nor been undone."""

    def run(self) -> None:
        """Step. After an out-of-memory all is as before, and it can be called again.

        Raises:
            torch.OutOfMemoryError: memory ran out.
            PartialStepError: the step failed, and can neither be undone nor done to its end.
        """
        if self._is_lost:
            self._resume_interrupted()
            return
        begun = None if self._known is None else self._known.begin(reads_host=self._draws.are_read)
        if begun is None:
            self._known = None  # what it holds may have been replaced
        if begun is None and self._tries_left:
            self._run_from_tree()
        elif (begun is None or begun.kind.seen == _LOOKS) and self._needs_no_copy():
            self._run_uncopied(begun)
        elif begun is None:
            self._run_from_tree()
        else:
            self._run_from_copies(begun)

    def _needs_no_copy(self) -> bool:
        """Return whether steps run as they are."""
        is_seen = self._is_careful or self._log.count or torch._C._len_torch_dispatch_stack()
        return not is_seen and has_room(self._needed)

    # ── as it is ────────────────────────────────────────────────────────────────────────────────────────────

    def _run_uncopied(self, begun: _BegunStep | None) -> None:
        self._copies = []
        self._is_lost = True
        is_resumable = begun is not None and begun.kind.changes is not None and not has_step_hooks(self._optimizer)
        try:
            (step_without_hooks(self._optimizer) if is_resumable else self._optimizer.step)()
            self._is_lost = False
            self._look_at_draws(begun)
            return
        except BaseException as error:
            self._is_careful = True
            if not is_out_of_memory(error):
                versions = [] if begun is None else [*map(_version, begun.tensors)]
                self._interrupted = begun if is_resumable else None, versions
                raise
            self._log.record(Failure.of(error))
            is_resumable = is_resumable and not _is_compiled(error)
            caught = error
        text = str(caught)
        clear_frames(caught)
        del caught
        free_memory()
        self._finish(begun if is_resumable else None, text)

    def _finish(self, begun: _BegunStep | None, text: str) -> None:
        """Do a step to its end that has failed without a copy."""
        known = self._known
        if known is None or begun is None or begun.kind.changes is None:
            raise PartialStepError(
                f"{text}; it is not known what a step of {type(self._optimizer).__name__} changes, and it is copied "
                "only from the first time on that memory runs out"
            )
        if any(begun.changes()) or begun.has_moved():
            self._resume(known, begun, begun.kind.changes)
            self._is_lost = False
        else:
            known.put_back(begun)
            self._is_lost = False
            self.run()  # from copies now

    def _resume(self, known: _KnownOptimizer, begun: _BegunStep, expected: list[int]) -> None:
        """Do the rest of a step that has failed.

        Raises:
            PartialStepError: it cannot be done, or nobody can know whether it was done right.
        """
        keys = [*map(storage_key, begun.tensors)]
        done = dict(zip(keys, begun.changes(), strict=True))
        if begun.has_moved():
            raise PartialStepError("it has given a tensor other memory")
        known.put_back(begun)
        resumption = StepResumption(done, dict(zip(keys, expected, strict=True)), self._log)
        try:
            with resumption:
                self._optimizer.step()
        except Exception as error:
            raise PartialStepError(str(error)) from error
        tree = StateTree(self._optimizer)
        grads = {id(grad) for _, grad in tree.gradients}
        resumption.check(one for one in tree.tensors if id(one) not in grads)

    def _resume_interrupted(self) -> None:
        """Resume a step that something else than memory has interrupted (Ctrl-C, say), if nothing changed since."""
        (begun, versions), self._interrupted = self._interrupted, (None, [])
        if begun is None or versions != [*map(_version, begun.tensors)]:
            raise PartialStepError("it was interrupted before")
        self._finish(begun, "it was interrupted")

    # ── copied ──────────────────────────────────────────────────────────────────────────────────────────────

    def _run_from_copies(self, begun: _BegunStep) -> None:
        kind, known = begun.kind, self._known
        assert known is not None
        if kind.seen:
            self._tries_left = _MOST_TRIES
        self._copy(begun.tensors)
        keys = [*map(storage_key, begun.tensors)]
        is_observed = torch._C._len_torch_dispatch_stack()
        counting = RetryOps(set(keys), self._log) if kind.seen == 1 and kind.changes and not is_observed else None
        try:
            with counting or contextlib.nullcontext():
                self._optimizer.step()
        except BaseException as error:
            self._is_careful = True
            known.put_back(begun)
            if retry(lambda: self._restore(begun.tensors)).failure is not None:
                raise PartialStepError(str(error)) from error
            raise
        self._look_at_draws(begun)
        if kind.seen == _LOOKS or is_observed:
            return
        changes = begun.changes() if counting is None else [counting.changes[key] for key in keys]
        unchanged = [pair for *pair, times in zip(begun.tensors, self._copies, changes, strict=True) if not times]
        is_shown = all(torch.equal(tensor.to(copy.device), copy) for tensor, copy in unchanged)
        is_countable = is_shown and len(set(keys)) == len(keys) and not begun.has_moved()
        is_equal = kind.seen == 0 or changes == kind.changes
        kind.changes = changes if is_countable and is_equal else None
        kind.seen += 1

    def _look_at_draws(self, begun: _BegunStep | None) -> None:
        if begun is not None and self._known is not None:
            self._draws.look(begun.random, self._known.devices)

    def _run_from_tree(self) -> None:
        """Step with all that can be reached from the optimizer looked for anew."""
        tree = StateTree(self._optimizer)
        dense = [tensor for tensor in tree.tensors if tensor.layout is torch.strided]
        sparse = [tensor for tensor in tree.tensors if tensor.layout is not torch.strided]
        self._copy(dense)
        versions = [tensor._version for tensor in sparse]
        before = RandomState.now({tensor.device for tensor in dense if tensor.device.type not in ("cpu", "meta")})
        try:
            self._optimizer.step()
        except BaseException as error:
            self._is_careful = True
            if tree.unknown:
                names = ", ".join(sorted({kind.__qualname__ for kind in tree.unknown}))
                raise PartialStepError(
                    f"{error}; {type(self._optimizer).__name__} keeps things that cannot be copied: {names}"
                ) from error
            if versions != [tensor._version for tensor in sparse]:
                raise PartialStepError(str(error)) from error
            tree.restore()
            if retry(lambda: self._restore(dense)).failure is not None:
                raise PartialStepError(str(error)) from error
            before.restore()
            raise
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        self._needed = nbytes_by_accelerator(params)
        if self._tries_left:
            self._tries_left -= 1
            known = _KnownOptimizer(StateTree(self._optimizer))
            self._known = known if known.is_plain else None

    @torch.no_grad()
    def _copy(self, tensors: list[Tensor]) -> None:
        fitting = len(self._copies) == len(tensors) and all(map(_is_like, self._copies, tensors))
        if not fitting:
            self._copies = []  # freed first: there may be no room for both
            made = attempt(lambda: [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]).value
            self._copies = made or [torch.empty_like(one, requires_grad=False, device=_HOST) for one in tensors]
        if tensors:
            torch._foreach_copy_(self._copies, tensors)

    @torch.no_grad()
    def _restore(self, tensors: list[Tensor]) -> None:
        pairs = zip(tensors, self._copies, strict=True)
        # An expanded tensor cannot be written to, so it has not changed.
        own = [pair for pair in pairs if torch._debug_has_internal_overlap(pair[0]) != 1]
        if own:
            torch._foreach_copy_([tensor for tensor, _ in own], [copy for _, copy in own])


def _is_compiled(error: BaseException) -> bool:
    """Return whether an error comes out of what `torch.compile` has made, which changes several tensors at once."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("_dynamo" in file or "torchinductor" in file or "_inductor" in file for file in files)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _is_like(copy: Tensor, tensor: Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.device in (tensor.device, _HOST)
