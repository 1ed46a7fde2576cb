"""`penstock run --distributed`: what a plain loader of an unedited script becomes."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import IterableDataset

from penstock.feed.loader import DataLoader, T_co


class SharedOut(DataLoader[T_co]):
    """penstock's DataLoader, which shares out its samples over ranks where it shuffles and has no sampler of its own.

    Others stay whole on each rank: those that evaluate, mostly.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(DataLoader.__init__).bind(self, *args, **kwargs).arguments
        has_own_order = given.get("sampler") is not None or given.get("batch_sampler") is not None
        is_plain = given.get("shuffle") and not has_own_order and not isinstance(given["dataset"], IterableDataset)
        if is_plain:
            kwargs.setdefault("distributed", True)
        super().__init__(*args, **kwargs)
