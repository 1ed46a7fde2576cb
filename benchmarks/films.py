"""Films of noise, and datasets of the clips that are decoded of them, with or without PyAV."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # workers come by this module too


def write_film(folder: Path, pictures: int, side: int, codec: str = "mpeg4") -> Path:
    """Write a film of noise that is twice as large as what is made of it; without PyAV it is Motion-JPEG."""
    draw = np.random.default_rng(0)
    found = (
        draw.integers(0, 256, (8, 8, 3), dtype=np.uint8).repeat(side // 4, 0).repeat(side // 4, 1)
        for _ in range(pictures)
    )
    return (
        _write_mp4(folder / "film.mp4", found, codec) if find_spec("av") else _write_jpegs(folder / "film.mjpeg", found)
    )


def _write_mp4(film: Path, pictures: Iterable[np.ndarray], codec: str) -> Path:
    import av

    with av.open(str(film), "w") as out:
        stream = out.add_stream(codec, rate=25)
        for number, pixels in enumerate(pictures):
            if not number:
                stream.height, stream.width = pixels.shape[:2]
                stream.pix_fmt = "yuv420p"
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts = number
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return film


def _write_jpegs(film: Path, pictures: Iterable[np.ndarray]) -> Path:
    """Write JPEG files one behind the other, each with its length before it."""
    from PIL import Image

    with film.open("wb") as out:
        for pixels in pictures:
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, "jpeg", quality=90)
            out.write(encoded.tell().to_bytes(8, "little") + encoded.getvalue())
    return film


def frames(film: Path, side: int) -> Iterator[Tensor]:
    """Yield a film's frames, decoded: (3, side, side) uint8."""
    import live_video

    if film.suffix == ".mp4":
        yield from live_video.frames(str(film), side)
        return
    from PIL import Image

    with film.open("rb") as file:
        while length := int.from_bytes(file.read(8), "little"):
            image = Image.open(io.BytesIO(file.read(length)))
            image.draft("RGB", (side, side))  # half of the sides are a quarter of the work
            yield torch.from_numpy(np.array(image.convert("RGB").resize((side, side)))).permute(2, 0, 1)


class Clips(Dataset[Tensor]):
    """Sample i is the i-th clip of a film, decoded anew: (3, frames, side, side) uint8."""

    def __init__(self, film: Path, clips: int, frames: int, side: int) -> None:
        self.film, self.clips, self.frames, self.side = film, clips, frames, side

    def __len__(self) -> int:
        return self.clips

    def __getitem__(self, index: int) -> Tensor:
        import live_video

        found = live_video.clips(frames(self.film, self.side), self.frames, 1)
        return next(itertools.islice(found, index % 8, None))


class Cameras(IterableDataset[Tensor]):
    """Clips as they come from a camera, which shows a film again and again; each worker has a camera of its own."""

    def __init__(self, film: Path, clips: int, frames: int, side: int, every: int = 4) -> None:
        self.film, self.clips, self.frames, self.side, self.every = film, clips, frames, side, every

    def __iter__(self) -> Iterator[Tensor]:
        import live_video

        worker = get_worker_info()
        endless = (frame for _ in itertools.count() for frame in frames(self.film, self.side))
        found = live_video.clips(endless, self.frames, self.every)
        return itertools.islice(found, self.clips // (1 if worker is None else worker.num_workers))
