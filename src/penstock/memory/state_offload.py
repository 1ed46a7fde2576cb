"""An optimizer's state that waits in host memory while gradients are computed.

It comes to the device when the optimizer steps and goes back after that, by hooks that torch's optimizers have. So
activations and the state are never there at the same time. A copy on the host is only written to when the step is
over: what fails before that has not changed it. Copies are awaited, not overlapped: overlapping them is where
offloaders go wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer


class StateOffload:
    """The hooks of one optimizer; `close` takes them away, and leaves the state on the device.

    Args:
        optimizer: one of torch's kind, its parameters on an accelerator. Tensors without dimensions (step counters)
            and what lies on the host anyway stay where they are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._on_host: dict[tuple[Tensor, str], Tensor] = {}
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self.bring()),
            optimizer.register_step_post_hook(lambda *_: self.take()),
        )
        self.take()

    @torch.no_grad()
    def bring(self) -> None:
        """Copy the state to the device. May be called again after it has failed."""
        for param, name, tensor in self._offloadable():
            if self._on_host.get((param, name)) is tensor:
                self._optimizer.state[param][name] = self._home(param, tensor)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the state to the host, and let the device forget it. May be called again after it has failed."""
        for param, name, tensor in self._offloadable():
            host = self._on_host.get((param, name))
            if host is tensor:
                continue
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty_like(tensor, device="cpu", pin_memory=torch.accelerator.is_available())
            host.copy_(tensor)
            self._on_host[param, name] = self._optimizer.state[param][name] = host

    def close(self) -> None:
        """Offload no more."""
        for hook in self._hooks:
            hook.remove()
        self.bring()
        self._on_host.clear()

    def _home(self, param: Tensor, host: Tensor) -> Tensor:
        return host.to(param.device, copy=True)

    def _is_away(self, param: Tensor) -> bool:
        """Return whether a parameter's state is to be away from it."""
        return param.device.type != "cpu"

    def _offloadable(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        for param, state in self._optimizer.state.items():
            if not self._is_away(param):
                continue
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.ndim:
                    yield param, name, value


def offload_state(optimizer: Optimizer) -> StateOffload:
    """Have an optimizer's state wait in host memory between its steps.

    A step takes longer by two copies of the state over the link to the device.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> offload = offload_state(torch.optim.Adam([weight]))
        >>> offload.close()
    """
    return StateOffload(optimizer)
