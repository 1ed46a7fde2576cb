"""WholeStep: a step of an optimizer that is not torch's. One that fails is undone, or done to its end.

**Careful**: the step runs from a copy of all that can be reached from the optimizer, and is undone if it fails. That
takes as much memory again as parameters, gradients and moments, and the time to read and write them. Where the device
has no room for the copies, they are made on the host. **Resumable**: the step runs as it is, and is resumed if it
fails. That takes proof from two careful steps of the same parameters, moments and gradients (`known_optimizer.py`).
**Hopeful**: the step runs as it is, although nothing is proven. If it fails, it is begun again where version counters
show that nothing had changed, is resumed where each of its operations shows that this is right, and else is refused:
`PartialStepError`, and never weights that are wrong without a word.

The first steps are careful. Proven ones are resumable from then on, and others hopeful, but only until memory has run
out anywhere in the training step, in forward or backward too: from then on these are careful again. So what may be
refused is a failure that comes out of the blue, and only once. Steps are careful in any case where an accelerator has
no room for the temporaries of a step, and while a dispatch mode sees their operations; and those that are like no step
before, until eight in a row were. Nothing is proven of a step that calls what `torch.compile` has made: it would be
another one under a dispatch mode, and a kernel changes several tensors at once.
"""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.device.oom import is_out_of_memory
from penstock.memory.model_tensors import storage_key
from penstock.memory.recovery.attempt import attempt, clear_frames, free_memory, retry
from penstock.memory.recovery.failure import Failure, FailureLog
from penstock.memory.recovery.known_optimizer import BegunStep, KnownOptimizer, Stage
from penstock.memory.recovery.optimizer_state import (
    has_room,
    has_step_hooks,
    nbytes_by_accelerator,
    step_without_hooks,
)
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.resume_optimizer import PartialStepError
from penstock.memory.recovery.state_tree import StateTree
from penstock.memory.recovery.step_proof import StepProof

_MOST_TRIES = 8
"""Steps in a row before each of which the optimizer was another one than before, until it is compared no more."""
_HOST = torch.device("cpu")
_Known = tuple[KnownOptimizer, BegunStep] | None
"""A step that has begun; None where it is like no other."""


class WholeStep:
    """Steps `optimizer`. Random numbers are drawn again as the first time.

    Args:
        optimizer: not torch's.
        log: records every failure that was survived in here.
    """

    def __init__(self, optimizer: Optimizer, log: FailureLog) -> None:
        self._optimizer = optimizer
        self._log = log
        self._copies: list[Tensor] = []
        self._known: KnownOptimizer | None = None
        self._tries_left = _MOST_TRIES
        self._needed: dict[torch.device, int] = {}
        """Bytes that the temporaries of a step may take."""
        self._is_careful = False
        """Whether a step has failed before, or was not like those before it."""
        self._interrupted: tuple[_Known, list[int]] = None, []
        """What was interrupted, and the versions of what it changes."""
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
        known = self._known
        begun = None if known is None else known.begin()
        if known is None or begun is None:
            self._known = None  # what it holds may have been replaced
            if self._tries_left or not self._is_hopeful():
                self._run_from_tree()
            else:
                self._run_uncopied(None)
        elif self._needs_no_copy(begun.kind.stage):
            self._run_uncopied((known, begun))
        else:
            self._run_from_copies(known, begun)

    def _needs_no_copy(self, stage: Stage) -> bool:
        if stage is Stage.RESUMABLE:
            return self._is_undisturbed() and has_room(self._needed)
        return stage is Stage.UNPROVEN and self._is_hopeful()

    def _is_undisturbed(self) -> bool:
        """Return whether steps may be resumed, and learned about."""
        is_observed = torch._C._len_torch_dispatch_stack()
        return not self._is_careful and not is_observed and not has_step_hooks(self._optimizer)

    def _is_hopeful(self) -> bool:
        """Return whether steps that nothing is proven of run without a copy."""
        is_seen = self._is_careful or self._log.count or torch._C._len_torch_dispatch_stack()
        return not is_seen and has_room(self._needed)

    # ── resumable, or hopeful ───────────────────────────────────────────────────────────────────────────────

    def _run_uncopied(self, known: _Known) -> None:
        self._copies = []
        self._is_lost = True
        is_resumable = known is not None and known[1].kind.stage is Stage.RESUMABLE  # and so without hooks
        compiled = _count_compiled()
        try:
            (step_without_hooks(self._optimizer) if is_resumable else self._optimizer.step)()
            if known is not None and is_resumable:
                self._is_careful = known[1].changes() != known[1].kind.changes or compiled != _count_compiled()
            self._is_lost = False
            return
        except BaseException as error:
            self._is_careful = True
            if not is_out_of_memory(error):
                self._interrupted = known, [] if known is None else known[1].versions_now()
                raise
            self._log.record(Failure.of(error))
            caught = error
        text = str(caught)
        clear_frames(caught)
        del caught
        free_memory()
        self._finish(known if compiled == _count_compiled() else None, text)

    def _finish(self, known: _Known, text: str) -> None:
        """Do a step to its end that has failed without a copy."""
        if known is None or not known[1].kind.is_counted:
            raise PartialStepError(
                f"{text}; it is not known what a step of {type(self._optimizer).__name__} changes, and it is copied "
                "only from the first time on that memory runs out"
            )
        optimizer, begun = known
        if any(begun.changes()) or begun.has_moved():
            optimizer.resume(begun, self._log)
            self._is_lost = False
        else:
            optimizer.put_back(begun)
            self._is_lost = False
            self.run()  # carefully now

    def _resume_interrupted(self) -> None:
        """Resume a step that something else than memory has interrupted (Ctrl-C, say), if nothing changed since."""
        (known, versions), self._interrupted = self._interrupted, (None, [])
        if known is None or versions != known[1].versions_now():
            raise PartialStepError("it was interrupted before")
        self._finish(known, "it was interrupted")

    # ── careful ─────────────────────────────────────────────────────────────────────────────────────────────

    def _run_from_copies(self, known: KnownOptimizer, begun: BegunStep) -> None:
        if begun.kind.stage is not Stage.NEW:
            self._tries_left = _MOST_TRIES
        self._copy(begun.tensors)
        try:
            self._step_and_learn(begun)
        except BaseException as error:
            self._is_careful = True
            known.put_back(begun)
            if retry(lambda: self._restore(begun.tensors)).failure is not None:
                raise PartialStepError(str(error)) from error
            raise

    def _step_and_learn(self, begun: BegunStep) -> None:
        """Step; count the changes of the first step of a kind, and look whether the second one is resumable."""
        kind = begun.kind
        if kind.stage is Stage.NEW and self._is_undisturbed():
            is_compiled = _is_compiled(self._optimizer.step)
            kind.changes = begun.changes()
            unchanged = [
                pair for *pair, times in zip(begun.tensors, self._copies, kind.changes, strict=True) if not times
            ]
            is_seen = all(torch.equal(tensor.to(copy.device), copy) for tensor, copy in unchanged)
            is_countable = is_seen and not is_compiled and not begun.has_moved()
            kind.stage = Stage.COUNTED if is_countable else Stage.UNPROVEN
        elif kind.stage is Stage.COUNTED and self._is_undisturbed():
            keys = [*map(storage_key, begun.tensors)]
            proof = StepProof(set(keys))
            with proof:
                self._optimizer.step()
            is_same = len(set(keys)) == len(keys) and [proof.changes[key] for key in keys] == kind.changes
            kind.is_counted = is_same and not begun.has_moved() and proof.is_visible
            kind.stage = Stage.RESUMABLE if kind.is_counted and proof.is_resumable else Stage.UNPROVEN
        else:
            self._optimizer.step()
            if not self._is_careful and not torch._C._len_torch_dispatch_stack():
                kind.stage = Stage.UNPROVEN  # hooks, or a compiler, stay

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
            known = KnownOptimizer(self._optimizer, StateTree(self._optimizer))
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


def _is_compiled(step: Callable[[], object]) -> bool:
    """Run `step`; return whether it called something that `torch.compile` has made, or nobody can know."""
    is_profiled = sys.getprofile() is not None or _is_monitored()
    if is_profiled or "torch._dynamo.eval_frame" not in sys.modules:
        step()
        return "torch._dynamo.eval_frame" in sys.modules
    profile = cProfile.Profile(builtins=False)  # is C: what is Python might be compiled as well
    profile.runcall(step)
    through = sys.modules["torch._dynamo.eval_frame"].__file__
    return any(isinstance(one.code, CodeType) and one.code.co_filename == through for one in profile.getstats())


def _is_monitored() -> bool:
    """Return whether Python (3.12) has a profiler on that is not seen by `sys.getprofile`."""
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(monitoring.PROFILER_ID) is not None


def _count_compiled() -> int:
    """Return how many functions have been compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


def _is_like(copy: Tensor, tensor: Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.device in (tensor.device, _HOST)
