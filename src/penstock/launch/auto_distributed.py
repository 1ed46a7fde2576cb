"""The DataLoader of `penstock run --distributed`: shards the samples of an unedited script over ranks."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import IterableDataset

from penstock.loader.dataloader import DataLoader, T_co


class AutoDistributed(DataLoader[T_co]):
    """penstock's DataLoader, which shards its samples over ranks if it shuffles and has no sampler.

    Other loaders, usually those for evaluation, yield all samples on each rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(DataLoader.__init__).bind(self, *args, **kwargs).arguments
        has_sampler = arguments.get("sampler") is not None or arguments.get("batch_sampler") is not None
        is_sharded = (
            arguments.get("shuffle") and not has_sampler and not isinstance(arguments["dataset"], IterableDataset)
        )
        if is_sharded:
            kwargs.setdefault("distributed", True)
        super().__init__(*args, **kwargs)
