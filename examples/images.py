"""Train a classifier on a folder of images, one folder per class, and save it.

    python examples/make_digits.py
    python examples/images.py data/digits/train --test data/digits/test

Decoding, flips and collating happen in workers; batches arrive on the device as uint8 and become floats there.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_resnet import BLOCKS, resnet  # this folder's
from torch import Tensor, nn

import penstock


def flipped(sample: dict[str, Any]) -> dict[str, Any]:
    """Flip every second image, the same ones for the same seed, whatever the number of workers."""
    if penstock.sample_rng().random() < 0.5:
        sample["image"] = sample["image"][:, :, ::-1].copy()
    return sample


def make_model(classes: int, depth: int) -> nn.Module:
    return resnet(classes, depth, width=16 if depth == 14 else 64).to(memory_format=torch.channels_last)


def as_floats(images: Tensor) -> Tensor:
    return images.to(memory_format=torch.channels_last).float() / 127.5 - 1


@torch.no_grad()
def accuracy(model: nn.Module, loader: penstock.DataLoader[Any]) -> float:
    correct = total = 0
    for batch in loader:
        correct += (model(as_floats(batch["image"])).argmax(1) == batch["label"]).sum().item()
        total += len(batch["label"])
    return correct / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--test", type=Path, help="a folder of held-out images with the same classes")
    parser.add_argument("--flip", action="store_true", help="flip images at random (not for digits)")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--depth", type=int, default=14, choices=BLOCKS, help="50 is ResNet-50")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, default=Path("model.pt"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    source = penstock.open(args.folder, size=args.size)
    options: dict[str, Any] = {"batch_size": 64, "num_workers": args.workers, "device": device, "seed": 0}
    loader = penstock.DataLoader(source.map(flipped) if args.flip else source, shuffle=True, **options)
    classes = sorted(entry.name for entry in args.folder.iterdir() if entry.is_dir())
    model = make_model(len(classes), args.depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        for batch in loader:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(model(as_floats(batch["image"])), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {loader.statistics().stall_fraction:.0%} of the time waiting")
    if args.test:
        held_out = accuracy(model.eval(), penstock.DataLoader(penstock.open(args.test, size=args.size), **options))
        print(f"held-out accuracy {held_out:.1%}")
    torch.save({"model": model.state_dict(), "classes": classes, "size": args.size, "depth": args.depth}, args.save)


if __name__ == "__main__":
    main()
