"""OptimizerOffload: an optimizer's state waits in host memory while gradients are computed.

Step hooks of the optimizer bring it to the device before a step and take it back afterwards, so activations and the
state are never on the device at the same time. A host copy is written only when the step is over, so a failure before
that does not change it. Copies are not overlapped with computing, because a step must not see half of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer


class OptimizerOffload:
    """The hooks of one optimizer; `close` removes them, and leaves the state on the device.

    Args:
        optimizer: its parameters lie on an accelerator. Tensors without dimensions (step counters), and the state of
            parameters on the host, stay where they are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._on_host: dict[tuple[Tensor, str], Tensor] = {}
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self.load()),
            optimizer.register_step_post_hook(lambda *_: self.offload()),
        )
        self.offload()

    @torch.no_grad()
    def load(self) -> None:
        """Copy the state to the device. May be called again after it has failed."""
        for param, name, tensor in self._offloadable():
            if self._on_host.get((param, name)) is tensor:
                self._optimizer.state[param][name] = self._copy_to_device(param, tensor)

    @torch.no_grad()
    def offload(self) -> None:
        """Move the state to the host. May be called again after it has failed."""
        for param, name, tensor in self._offloadable():
            host = self._on_host.get((param, name))
            if host is tensor:
                continue
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty_like(tensor, device="cpu", pin_memory=torch.accelerator.is_available())
            host.copy_(tensor)
            self._on_host[param, name] = self._optimizer.state[param][name] = host

    def close(self) -> None:
        """Stop offloading."""
        for hook in self._hooks:
            hook.remove()
        self.load()
        self._on_host.clear()

    def _copy_to_device(self, param: Tensor, host: Tensor) -> Tensor:
        return host.to(param.device, copy=True)

    def _is_offloaded(self, param: Tensor) -> bool:
        """Return whether a parameter's state waits on the host."""
        return param.device.type != "cpu"

    def _offloadable(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        for param, state in self._optimizer.state.items():
            if not self._is_offloaded(param):
                continue
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.ndim:
                    yield param, name, value


def offload_state(optimizer: Optimizer) -> OptimizerOffload:
    """Keep an optimizer's state in host memory between its steps.

    A step takes longer by two copies of the state over the link to the device.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> offload = offload_state(torch.optim.Adam([weight]))
        >>> offload.close()
    """
    return OptimizerOffload(optimizer)
