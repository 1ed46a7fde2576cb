"""Train a small CNN on a folder of images, one folder per class: plain PyTorch, nothing else.

    python examples/train_digits.py --data data/digits
    penstock run examples/train_digits.py --data data/digits

DIR contains train/ and test/, each with one folder per class; or the class folders themselves, and then every fifth
image of a class is held out.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
HELD_OUT = 5


class ImageFolder(Dataset):
    """Image files and their labels; every access reads and decodes a file."""

    def __init__(self, files: list[tuple[Path, int]], side: int, augment: bool = False) -> None:
        self.files = files
        self.side = side
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as image:
            image = image.convert("RGB")
            image = image.resize((self.side, self.side), Image.Resampling.BILINEAR)
        if self.augment:
            angle = 20 * torch.rand(()).item() - 10
            image = image.rotate(angle, Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.side, self.side, 3).permute(2, 0, 1)
        return pixels.float().div_(127.5).sub_(1), label


class SmallCNN(nn.Module):
    """Three convolutions and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.classify = nn.Linear(64 * 4 * 4, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images))


def image_files(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """List the images below each class folder, in a fixed order."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]


def class_folders(folder: Path) -> list[str]:
    """List the names of the folders in `folder`."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def find_images(folder: Path) -> tuple[list[str], list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Return the classes, the images to train on and the images held out."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder; write the digits with examples/make_digits.py, or use --data DIR")
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        classes = class_folders(folder / "train")
        train, test = image_files(folder / "train", classes), image_files(folder / "test", classes)
    else:
        classes = class_folders(folder)
        files = image_files(folder, classes)
        test = files[::HELD_OUT]
        train = [file for number, file in enumerate(files) if number % HELD_OUT]
    if not train or not test:
        raise SystemExit(f"{folder} has no folders of images, one per class; use --data DIR")
    return classes, train, test


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Train on every batch once, and return the mean loss."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total.item() / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the fraction of images that the model classifies correctly."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        guesses = model(images.to(device, non_blocking=True)).argmax(1)
        correct += int((guesses == labels.to(device)).sum())
        total += len(labels)
    return correct / total


def select_device(name: str) -> torch.device:
    """Return the device with this name; for "auto", the best available one."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on a folder of images, one folder per class.")
    parser.add_argument("--data", type=Path, default=Path("data/digits"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode images (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps ... (default: the best available)")
    parser.add_argument("--image-size", type=int, default=32, help="side in pixels (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = select_device(args.device)
    classes, train, test = find_images(args.data)
    print(f"{len(train)} images to train on, {len(test)} held out, {len(classes)} classes, on {device}")

    loading = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    if args.workers:
        loading["persistent_workers"] = True
    train_loader = DataLoader(ImageFolder(train, args.image_size, augment=True), shuffle=True, **loading)
    test_loader = DataLoader(ImageFolder(test, args.image_size), **loading)

    model = SmallCNN(len(classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, train_loader, optimizer, device)
        schedule.step()
        print(f"epoch {epoch:2}: loss {loss:.4f}, held-out accuracy {accuracy(model, test_loader, device):.2%}")
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
