"""Images that Pillow decodes at full size and that are made smaller right afterwards.

A JPEG decoder can leave out detail while it decodes (`Image.draft`), at a fraction of the time; whether that would
have been enough depends on what the dataset does next. So for some samples `Image.resize` and `Image.reduce` are
patched to record their arguments. Source: Pillow's documentation of `Image.draft`; libjpeg's scaled decoding.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.observe.doctor.probe_results import ImageDecode

_TRIES = 3


class ImageDecodeRecorder:
    """Records what is decoded and what is shrunk inside of `recording`."""

    def __init__(self) -> None:
        self._decoded: dict[tuple[int, int], str] = {}
        self._files: dict[tuple[int, int], str] = {}
        self._resample: Any = None
        self._shrunk: list[tuple[tuple[int, int], tuple[int, int]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record Pillow's calls, if the program has imported it."""
        image, file = sys.modules.get("PIL.Image"), sys.modules.get("PIL.ImageFile")
        if image is None or file is None:
            yield
            return
        load, resize, reduce = file.ImageFile.load, image.Image.resize, image.Image.reduce

        def recorded_load(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder._note_load(self)
            return load(self, *args, **kwargs)

        def recorded_resize(self: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
            recorder._note_size(self, size, args, kwargs)
            return resize(self, size, *args, **kwargs)

        def recorded_reduce(self: Any, factor: Any, *args: Any, **kwargs: Any) -> Any:
            small = reduce(self, factor, *args, **kwargs)
            recorder._shrunk.append((self.size, small.size))
            return small

        recorder = self
        file.ImageFile.load, image.Image.resize, image.Image.reduce = (
            recorded_load,
            recorded_resize,
            recorded_reduce,
        )
        try:
            yield
        finally:
            file.ImageFile.load, image.Image.resize, image.Image.reduce = load, resize, reduce

    def result(self) -> ImageDecode | None:
        """Return what was shrunk after it had been decoded at full size; None if nothing was."""
        pairs = [(big, small) for big, small in self._shrunk if big in self._decoded and small[0] and small[1]]
        if not pairs:
            return None
        size, kept = sorted(pairs, key=lambda pair: _area(pair[0]) / _area(pair[1]))[len(pairs) // 2]
        tried = _time_decodes(self._files.get(size), kept, self._resample)
        return ImageDecode(
            images=len(pairs),
            pixel_ratio=statistics.median(_area(big) / _area(small) for big, small in pairs),
            decoded_size=size,
            kept_size=kept,
            format=self._decoded[size],
            full_decode_s=tried[0] if tried else None,
            reduced_decode_s=tried[1] if tried else None,
        )

    def _note_load(self, image: Any) -> None:
        if getattr(image, "tile", None):  # otherwise it has been decoded before
            self._decoded.setdefault(image.size, image.format or "")
            if getattr(image, "filename", ""):
                self._files.setdefault(image.size, str(image.filename))

    def _note_size(self, image: Any, size: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        box = kwargs.get("box") or (args[1] if len(args) > 1 else None)
        if box is None:
            self._resample = kwargs.get("resample") or (args[0] if args else None)
            self._note_load(image)
            self._shrunk.append((image.size, (int(size[0]), int(size[1]))))


def _time_decodes(file: str | None, kept: tuple[int, int], resample: Any) -> tuple[float, float] | None:
    """Shrink `file` to size `kept`; return the seconds with a full decode and with one reduced to no less than that."""
    if not file:
        return None
    image = sys.modules["PIL.Image"]

    def best_s(prepare: Callable[[Any], Any]) -> float:
        taken_s = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            with image.open(file) as opened:
                prepare(opened)
                opened.resize(kept, resample)
            taken_s.append(time.perf_counter() - began)
        return min(taken_s)

    try:
        return best_s(lambda _: None), best_s(lambda opened: opened.draft(None, kept))
    except OSError:
        return None


def _area(size: tuple[int, int]) -> int:
    return max(1, size[0] * size[1])
