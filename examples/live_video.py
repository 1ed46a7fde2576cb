"""Run a 3-D CNN on the clips of a camera, a stream or a video file, with bounded latency.

    python examples/live_video.py 0      # the first camera (Linux); or rtsp://host/stream, or film.mp4

Clips are batched while the model is busy; a clip waits no longer than --latency for others to fill its batch. Copies to
the device, the model and copies back overlap. Put a trained model in: this one's classes mean nothing.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import penstock


def frames(where: str, side: int) -> Iterator[Tensor]:
    """Yield frames as uint8 tensors (3, side, side), as they arrive."""
    import av

    camera = where.isdigit()
    with av.open(f"/dev/video{where}" if camera else where, format="v4l2" if camera else None) as video:
        for frame in video.decode(video=0):
            pixels = frame.reformat(side, side, "rgb24").to_ndarray()
            yield torch.from_numpy(pixels).permute(2, 0, 1)


def clips(arriving: Iterable[Tensor], length: int, every: int) -> Iterator[Tensor]:
    """Yield the last `length` frames as a uint8 tensor (3, length, side, side), at every `every`-th frame."""
    last: deque[Tensor] = deque(maxlen=length)
    for number, frame in enumerate(arriving, 1):
        last.append(frame)
        if len(last) == length and (number - length) % every == 0:
            yield torch.stack(list(last), 1)


class ClipNet(nn.Sequential):
    """A small 3-D CNN: uint8 clips (batch, 3, frames, side, side) to the scores of classes."""

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        layers: list[nn.Module] = []
        for inside, outside in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv3d(inside, outside, 3, 2, 1, bias=False), nn.BatchNorm3d(outside), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4 * width, classes))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.float() / 127.5 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="a camera's number, a URL or a file")
    parser.add_argument("--side", type=int, default=112, help="frames are scaled to this size")
    parser.add_argument("--frames", type=int, default=16, help="of a clip")
    parser.add_argument("--every", type=int, default=4, help="a clip begins at every so many")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that a clip waits for others, at most")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = ClipNet().to(device).eval()
    arriving = clips(frames(args.source, args.side), args.frames, args.every)
    outputs: Iterator[Any] = penstock.infer(
        model, arriving, device=device, batch_size=args.batch_size, max_latency_s=args.latency
    )
    started, count = time.perf_counter(), 0
    for scores in outputs:  # on the host, in order, complete
        for probabilities in scores.softmax(1):
            count, (most, likely) = count + 1, probabilities.max(0)
            print(f"clip {count}: class {likely} ({most:.5f}), {len(scores)} in the batch")
    print(f"{count} clips, {count / (time.perf_counter() - started):.0f} per second")


if __name__ == "__main__":
    main()
