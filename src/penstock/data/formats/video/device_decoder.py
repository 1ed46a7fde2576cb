"""Video frames decoded on a GPU by torchcodec (NVDEC); see formats/decoding_device.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.errors import SourceError
from penstock.data.formats.decoding_device import library
from penstock.data.formats.video.frame_index import FrameIndex


class DeviceVideoDecoder:
    """Decodes frames of one video file on a device. Used by one thread at a time.

    The frames that are asked for at once may have `max_nbytes`, before they are resized.
    """

    def __init__(self, path: str, index: FrameIndex, device: torch.device, max_nbytes: int) -> None:
        if not index.has_times:
            raise SourceError("its container has no usable times, by which torchcodec finds frames; use device='cpu'")
        self._index, self._device, self._max_nbytes = index, device, max_nbytes
        self._decoder: Any = library("torchcodec.decoders").VideoDecoder(path, device=str(device))
        if getattr(self._decoder.metadata, "rotation", None):
            raise SourceError("torchcodec applies the rotation in its metadata, penstock does not; use device='cpu'")

    def frames(self, wanted: Sequence[int]) -> torch.Tensor:
        """Return the frames with these names, uint8 (frames, 3, height, width).

        Raises:
            SourceError: torchcodec finds others, or they are more than `max_nbytes`.
        """
        nbytes = len(wanted) * 3 * self._decoder.metadata.height * self._decoder.metadata.width
        if nbytes > self._max_nbytes:
            raise SourceError(f"a clip of {nbytes} bytes; {self._max_nbytes} are the most (max_record_nbytes)")
        names = np.asarray(wanted)
        found = self._decoder.get_frames_played_at(((names + 0.25) / self._index.units_per_s).tolist())
        times = np.asarray(found.pts_seconds.cpu()) * self._index.units_per_s
        if not np.allclose(times, names, rtol=0, atol=0.25):
            raise SourceError(f"torchcodec finds frames at {times.tolist()[:4]} in place of {list(wanted)[:4]}")
        frames: torch.Tensor = found.data
        return frames

    def closeness(self, first: int) -> float:
        """Return 0: torchcodec knows where it is."""
        return 0.0

    def close(self) -> None:
        """Drop the decoder."""
        self._decoder = None
