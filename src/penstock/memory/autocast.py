"""Autocast: mixed precision from a dtype or from arguments of `torch.autocast`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from penstock.core.errors import OptionError


class Autocast:
    """The contexts in which losses are computed.

    Args:
        wanted: a dtype, arguments of `torch.autocast`, or None for full precision.
        devices: the model's accelerators, whose type is the default.
    """

    def __init__(self, wanted: torch.dtype | dict[str, Any] | None, devices: Sequence[torch.device]) -> None:
        self._options: dict[str, Any] | None = None
        if wanted is not None and not isinstance(wanted, (torch.dtype, dict)):
            raise OptionError(
                f"autocast must be a dtype, as in torch.bfloat16, or arguments of torch.autocast, not {wanted!r}"
            )
        if wanted is not None:
            self._options = {"dtype": wanted} if isinstance(wanted, torch.dtype) else dict(wanted)
            self._options.setdefault("device_type", devices[0].type if devices else "cpu")
        self.is_off = self._options is None
        """Whether losses are computed in full precision."""

    def __call__(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the model's own device."""
        return contextlib.nullcontext() if self._options is None else torch.autocast(**self._options)

    def on_cpu(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the same model on the CPU, where it is planned."""
        if self._options is None:
            return contextlib.nullcontext()
        dtype = self._options.get("dtype") or torch.get_autocast_dtype(self._options["device_type"])
        return torch.autocast(**{**self._options, "device_type": "cpu", "dtype": dtype})
