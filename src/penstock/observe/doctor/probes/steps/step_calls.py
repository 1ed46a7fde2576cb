"""What some steps do: calls that wait for the device, copies that cannot overlap, losses, gradients and updates.

These steps run under a `TorchFunctionMode`, which intercepts the tensor operations that Python calls. Those that
torch's own code calls (its optimizers read step counters with `.item()`) are not counted: the user cannot change them.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.core.user_code import is_users, line_text, users_frames
from penstock.observe.doctor.contents.seen_labels import labels_of
from penstock.observe.doctor.probes.batch_values import all_finite
from penstock.observe.doctor.probes.steps.kept_gradients import KeptGradients
from penstock.observe.doctor.probes.steps.layer_modes import LayerModes
from penstock.observe.doctor.probes.steps.loss_inputs import LossInputs
from penstock.observe.doctor.probes.steps.parameter_use import ACCUMULATE, ParameterUse
from penstock.observe.doctor.step_results import StepCall, StepCalls, WholeImages

_WHOLE_IMAGE = 64.0
"""Largest value of an image: whole numbers up to this may be classes, depths or counts."""

_SYNCHRONIZING = {
    torch.Tensor.item: ".item()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__bool__: "a tensor as a condition",
    torch.Tensor.nonzero: ".nonzero()",
}
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to, torch.Tensor.type})
_SMALLER = (torch.float32, torch.float16, torch.bfloat16)

_DEBUGGING: dict[str, Callable[[], bool]] = {
    "torch.autograd.set_detect_anomaly(True)": torch.is_anomaly_enabled,
    "torch.profiler, or torch.autograd.profiler": torch.autograd._profiler_enabled,  # type: ignore[attr-defined]
    "sys.settrace(), as a debugger and coverage set it": lambda: sys.gettrace() is not None,
    "sys.setprofile(), as cProfile sets it": lambda: sys.getprofile() is not None,
}
"""What slows down every operation, and whether it is on."""

_CHANNELS = (1, 3, 4)
_LOOKED_AT = 8
"""Images of a batch."""
_MEAN, _STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
"""Of ImageNet's images, from 0 to 1; see torchvision's pretrained models."""
_ROUNDING = 0.02

_Place = tuple[str, str, int]


class StepCallRecorder:
    """Records the calls of the steps between `enter` and `leave`."""

    def __init__(self) -> None:
        self._steps = 0
        self._synchronizing: dict[_Place, Counter[int]] = {}
        self._pageable_copies: dict[_Place, Counter[int]] = {}
        self._double_casts: dict[_Place, Counter[int]] = {}
        self._mode: _RecordingMode | None = None
        self._hooks: list[RemovableHandle] = []
        self._optimized_by: FrameType | None = None
        """The function of the program's that has called an optimizer, while that is at work."""
        self._images: dict[int, WholeImages | None] = {}
        self._labels: set[int] = set()
        self._uses_labels = False
        self._has_gaps = False
        self._leaves_gaps_out: bool | None = None
        self._trains = False
        self._weight_use = ParameterUse()
        self._modes = LayerModes()
        self._losses = LossInputs()
        self._kept = KeptGradients()
        self._debugged_by: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return self._steps

    def enter(self, batch: Any = None) -> None:
        """Begin to record a step, which gets `batch`."""
        self._steps += 1
        self._labels, self._has_gaps = set(), False
        with contextlib.suppress(Exception):  # of tensors that have no such values: nested, quantized, of one's own
            self._has_gaps = not all_finite(batch)
            labels = labels_of(batch)
            self._labels = set() if labels is None else {labels.data_ptr()}
        self._losses.begin_step()
        self._debugged_by = tuple(name for name, is_on in _DEBUGGING.items() if is_on())
        self._mode = _RecordingMode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._end_update),
        ]

    def trained_models(self) -> tuple[torch.nn.Module, ...]:
        """Return the modules in training mode that the program trains, as far as that mode changes what they do."""
        return self._modes.trained_models()

    @property
    def has_labels(self) -> bool:
        """Whether it is still to be seen if this step uses its labels."""
        return bool(self._labels) and not self._uses_labels

    def leave(self) -> None:
        """Stop recording; may be called at any time."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for hook in self._hooks:
                hook.remove()
            self._end_update()
            self._losses.end_step()
            with contextlib.suppress(Exception):
                self._weight_use.end_step()
                self._kept.end_step(self._steps, self._weight_use.weights)

    def _begin_update(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._optimized_by = next(users_frames(sys._getframe(1)), None)
        with contextlib.suppress(Exception):
            self._weight_use.note_optimizer(optimizer)
            self._kept.note_optimizer(optimizer)

    def _end_update(self, *_: object) -> None:
        self._optimized_by = None

    def result(self) -> StepCalls:
        """Return the calls that every recorded step made."""
        return StepCalls(
            steps=self._steps,
            synchronizing=self._in_every_step(self._synchronizing),
            pageable_copies=self._in_every_step(self._pageable_copies),
            double_casts=self._in_every_step(self._double_casts),
            computes_in_double=self._weight_use.computes_in_double,
            parameters=self._weight_use.parameters,
            untrained_parameters=self._weight_use.untrained(),
            left_out=self._weight_use.left_out(),
            updates_nothing=self._weight_use.updates_nothing,
            evaluates=self._modes.evaluates(),
            evaluates_whole=self._modes.evaluates_whole(),
            kept_gradients=self._kept.lines(self._steps),
            probabilities=self._losses.probabilities(),
            broadcast_losses=self._losses.broadcast(),
            whole_images=self._images_of_every_step(),
            uses_labels=self._uses_labels,
            leaves_gaps_out=bool(self._leaves_gaps_out),
            trains=self._trains,
            debugged_by=self._debugged_by,
        )

    def _images_of_every_step(self) -> WholeImages | None:
        found = [self._images.get(step) for step in range(1, self._steps + 1)]
        return found[0] if found and None not in found else None

    def _in_every_step(self, calls: Mapping[_Place, Counter[int]]) -> tuple[StepCall, ...]:
        return tuple(
            StepCall(what=what, line=line_text(file, number), per_step=sum(steps.values()) / self._steps)
            for (what, file, number), steps in calls.items()
            if len(steps) == self._steps
        )

    def note_synchronizing(self, what: str) -> None:
        """Note a call that waits for the device."""
        self._note(self._synchronizing, what)

    def note_pageable_copy(self, what: str) -> None:
        """Note a non-blocking copy from memory that is not pinned."""
        self._note(self._pageable_copies, what)

    def note_double_cast(self, what: str) -> None:
        """Note that a float64 tensor becomes a smaller one."""
        self._note(self._double_casts, what)

    def note_convolution(self, images: Any) -> None:
        """Note what a convolution gets, if it is the first of its step."""
        if self._steps not in self._images:
            self._images[self._steps] = _whole_images(images)

    def note_loss(self, loss: Any) -> None:
        """Note that gradients are computed, and whether the loss of a batch with values that are not finite is."""
        self._trains = True
        if self._has_gaps:
            self._leaves_gaps_out = self._leaves_gaps_out is not False and all_finite(loss.detach())

    def note_backward(self, losses: list[Any]) -> None:
        """Note of what gradients are computed."""
        self._losses.note_backward(losses)

    def note_gradients(self, *, are_computed: bool) -> None:
        """Note the gradients that parameters have, before and after others are computed."""
        if are_computed:
            self._kept.after(self._weight_use.weights, _line_of(next(users_frames(sys._getframe(1)), None)))
        else:
            self._kept.before(self._weight_use.weights)

    def note_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Note what a line of the program computes of what, beside what an optimizer does."""
        frame = next(users_frames(sys._getframe(1)), None)
        if frame is None or frame is not self._optimized_by:  # a closure of the program's is none of the optimizer
            self._weight_use.note(func, args, kwargs)
            self._modes.note(func, args, kwargs, made)
            self._losses.note(func, args, kwargs, made, _line_of(frame), self._labels)

    def note_operands(self, operands: tuple[Any, ...], made: Any) -> None:
        """Note whether the batch's labels, or what is made of them alone, meet another tensor."""
        tensors = [one for one in operands if isinstance(one, torch.Tensor)]
        own = [one for one in tensors if one.layout is torch.strided and one.data_ptr() in self._labels]
        if own and len(own) < len(tensors):
            self._uses_labels = True
        elif own and isinstance(made, torch.Tensor):
            self._labels.add(made.data_ptr())

    def _note(self, into: dict[_Place, Counter[int]], what: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((PACKAGE_FOLDER, torch.overrides.__file__)):
            frame = frame.f_back
        if frame is not None and is_users(frame.f_code.co_filename):
            place = what, frame.f_code.co_filename, frame.f_lineno
            into.setdefault(place, Counter())[self._steps] += 1


class _RecordingMode(TorchFunctionMode):
    def __init__(self, recorder: StepCallRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._of_the_host: dict[int, Any] = {}
        """Tensors that are made of numbers, and of each other: a program that used an accelerator had them here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # it would compile what follows, too
            return func(*args, **kwargs)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return func(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack():  # what is looked at would become part of a graph that is traced
            return func(*args, **kwargs)
        with contextlib.suppress(Exception):  # a program has to go on, whatever its tensors cannot be asked for
            self._note_before(func, args, kwargs)
        made = func(*args, **kwargs)
        with contextlib.suppress(Exception):
            self._note_after(func, args, kwargs, made)
        return made

    def _note_before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        what = _SYNCHRONIZING.get(func)
        if what is not None and args and id(args[0]) not in self._of_the_host and _waits_for_device(func, args[0]):
            self._recorder.note_synchronizing(what)
        if func is torch.conv2d and args:
            self._recorder.note_convolution(args[0])
        if func is torch.Tensor.to and _is_pageable_copy(args, kwargs):
            self._recorder.note_pageable_copy(".to(..., non_blocking=True)")
        if func is torch.Tensor.backward:
            self._recorder.note_loss(args[0])
        if func in (*ACCUMULATE, torch.autograd.grad):
            self._recorder.note_backward(tree_leaves((args[:1], kwargs.get("tensors"), kwargs.get("outputs"))))
        if func in ACCUMULATE:
            self._recorder.note_gradients(are_computed=False)

    def _note_after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        self._note_origin(made, (*args, *kwargs.values()))
        self._recorder.note_call(func, args, kwargs, made)
        if func in _CASTS and _is_double(args[0]) and getattr(made, "dtype", None) in _SMALLER:
            self._recorder.note_double_cast(f".{func.__name__}()")
        if self._recorder.has_labels:
            self._recorder.note_operands((*args, *kwargs.values()), made)
        if func in ACCUMULATE:
            self._recorder.note_gradients(are_computed=True)

    def _note_origin(self, made: Any, operands: tuple[Any, ...]) -> None:
        if isinstance(made, torch.Tensor):
            tensors = [one for one in tree_leaves(operands) if isinstance(one, torch.Tensor)]
            if all(id(one) in self._of_the_host for one in tensors):
                self._of_the_host[id(made)] = made
            else:
                self._of_the_host.pop(id(made), None)


def _line_of(frame: FrameType | None) -> tuple[str, int] | None:
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def _whole_images(images: Any) -> WholeImages | None:
    """Return what is known of a batch of images if all their values are whole numbers up to 255; else None.

    So they may be behind a normalisation that is meant for values from 0 to 1.
    """
    is_image = isinstance(images, torch.Tensor) and images.ndim == 4 and images.shape[1] in _CHANNELS
    if not is_image or not images.is_floating_point() or not images.numel():
        return None
    some = images.detach()[:_LOOKED_AT].float().cpu()
    is_normalised = some.shape[1] == len(_MEAN) and float(some.max()) > _WHOLE_IMAGE
    before = some * _STD[:, None, None] + _MEAN[:, None, None] if is_normalised else some
    for pixels, kind in ((some, False), (before, is_normalised)):
        low, high = (float(one) for one in pixels.aminmax())
        is_whole = bool(((pixels - pixels.round()).abs() <= (_ROUNDING if kind else 0.0)).all())
        if low >= -_ROUNDING * kind and _WHOLE_IMAGE < high <= 255 + _ROUNDING and is_whole:
            shown = str(images.dtype).removeprefix("torch.")
            return WholeImages(
                shape=tuple(images.shape), dtype=shown, low=round(low), high=round(high), is_normalised=kind
            )
    return None


def _waits_for_device(func: Any, tensor: torch.Tensor) -> bool:
    """Return whether a call waits for an accelerator, or would if its tensors were on one."""
    if func in (torch.Tensor.cpu, torch.Tensor.numpy):
        return tensor.device.type != "cpu"
    return tensor.device.type != "cpu" or not torch.accelerator.is_available()


def _is_pageable_copy(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    source = args[0]
    non_blocking = kwargs.get("non_blocking", False) or (
        any(isinstance(one, bool) for one in args[2:3]) and bool(args[2])
    )
    return bool(non_blocking) and source.device.type == "cpu" and not source.is_pinned()
