"""Run a model on a camera, a stream or a video file, with bounded latency.

    python examples/live_video.py 0                      # the first camera (Linux)
    python examples/live_video.py rtsp://host/stream
    python examples/live_video.py film.mp4 --batch-size 16

Frames are batched while the model is busy; a frame waits no longer than --latency for others to fill its batch. Copies
to the device, the model and copies back overlap.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import av
import torch
from torch import Tensor, nn

import penstock


def frames(where: str, side: int) -> Iterator[Tensor]:
    """Yield frames as uint8 tensors (3, side, side), as they arrive."""
    camera = where.isdigit()
    with av.open(f"/dev/video{where}" if camera else where, format="v4l2" if camera else None) as video:
        for frame in video.decode(video=0):
            pixels = frame.reformat(side, side, "rgb24").to_ndarray()
            yield torch.from_numpy(pixels).permute(2, 0, 1)


class Colours(nn.Module):
    """Returns the mean colour of each frame: put your detector here."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float().mean((2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="a camera's number, a URL or a file")
    parser.add_argument("--side", type=int, default=224, help="frames are scaled to this size")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that a frame waits for others, at most")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = Colours().to(device).eval()
    outputs: Iterator[Any] = penstock.infer(
        model, frames(args.source, args.side), device=device, batch_size=args.batch_size, max_latency_s=args.latency
    )
    started, count = time.perf_counter(), 0
    for colours in outputs:  # on the host, in order, complete
        count += len(colours)
        red, green, blue = colours[-1].tolist()
        print(f"frame {count}: red {red:.0f}, green {green:.0f}, blue {blue:.0f} ({len(colours)} in the batch)")
    print(f"{count} frames, {count / (time.perf_counter() - started):.0f} per second")


if __name__ == "__main__":
    main()
