"""Images that Pillow decodes whole and that are made smaller afterwards.

A JPEG decoder can leave out detail while it decodes (`Image.draft`), at a fraction of the time; whether that would
have done shows only in what is done next. So for some samples `Image.resize` and `Image.reduce` tell what they were
given. Source: Pillow's documentation of `Image.draft`; libjpeg's scaled decoding.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.observe.examination import Shrinking

_TRIES = 3


class ShrinkWitness:
    """Notes what is decoded and what is shrunk inside of `watching`."""

    def __init__(self) -> None:
        self._decoded: dict[tuple[int, int], str] = {}
        self._files: dict[tuple[int, int], str] = {}
        self._resample: Any = None
        self._shrunk: list[tuple[tuple[int, int], tuple[int, int]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at Pillow's images, when the program has imported it."""
        image, file = sys.modules.get("PIL.Image"), sys.modules.get("PIL.ImageFile")
        if image is None or file is None:
            yield
            return
        load, resize, reduce = file.ImageFile.load, image.Image.resize, image.Image.reduce

        def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
            witness._note_load(self)
            return load(self, *args, **kwargs)

        def resized(self: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
            witness._note_size(self, size, args, kwargs)
            return resize(self, size, *args, **kwargs)

        def reduced(self: Any, factor: Any, *args: Any, **kwargs: Any) -> Any:
            small = reduce(self, factor, *args, **kwargs)
            witness._shrunk.append((self.size, small.size))
            return small

        witness = self
        file.ImageFile.load, image.Image.resize, image.Image.reduce = loaded, resized, reduced
        try:
            yield
        finally:
            file.ImageFile.load, image.Image.resize, image.Image.reduce = load, resize, reduce

    def found(self) -> Shrinking | None:
        """Return what was shrunk after it had been decoded whole; None when nothing was."""
        whole = [(big, small) for big, small in self._shrunk if big in self._decoded and small[0] and small[1]]
        if not whole:
            return None
        size, kept = sorted(whole, key=lambda pair: _area(pair[0]) / _area(pair[1]))[len(whole) // 2]
        tried = _try(self._files.get(size), kept, self._resample)
        return Shrinking(
            images=len(whole),
            ratio=statistics.median(_area(big) / _area(small) for big, small in whole),
            size=size,
            kept=kept,
            format=self._decoded[size],
            whole_s=tried[0] if tried else None,
            reduced_s=tried[1] if tried else None,
        )

    def _note_load(self, image: Any) -> None:
        if getattr(image, "tile", None):  # else it has been decoded before
            self._decoded.setdefault(image.size, image.format or "")
            if getattr(image, "filename", ""):
                self._files.setdefault(image.size, str(image.filename))

    def _note_size(self, image: Any, size: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        box = kwargs.get("box") or (args[1] if len(args) > 1 else None)
        if box is None:
            self._resample = kwargs.get("resample") or (args[0] if args else None)
            self._note_load(image)
            self._shrunk.append((image.size, (int(size[0]), int(size[1]))))


def _try(file: str | None, kept: tuple[int, int], resample: Any) -> tuple[float, float] | None:
    """Shrink `file` to `kept`, decoded whole and decoded to no less than that; return the seconds of each."""
    if not file:
        return None
    image = sys.modules["PIL.Image"]

    def seconds(prepare: Callable[[Any], Any]) -> float:
        taken = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            with image.open(file) as opened:
                prepare(opened)
                opened.resize(kept, resample)
            taken.append(time.perf_counter() - began)
        return min(taken)

    try:
        return seconds(lambda _: None), seconds(lambda opened: opened.draft(None, kept))
    except OSError:
        return None


def _area(size: tuple[int, int]) -> int:
    return max(1, size[0] * size[1])
