"""Write scikit-learn's handwritten digits as PNG files, one folder per class: DIR/{train,test}/{0..9}/0000.png ...

The images are the 8x8 scans of the UCI set (1 797 of them), enlarged to 32x32. Every fifth image of a class is
held out.
"""

import argparse
import os
import shutil
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

SIDE = 32
HELD_OUT = 5


def write_digits(folder: Path) -> int:
    """Write all images below `folder`, and return their number."""
    digits = load_digits()
    count_by_label = [0] * 10
    for scan, label in zip(digits.images, digits.target, strict=True):
        number = count_by_label[label]
        count_by_label[label] += 1
        part = "test" if number % HELD_OUT == 0 else "train"
        target = folder / part / str(label) / f"{number:04}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((scan * (255 / 16)).astype("uint8"))
        image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(target)
    return sum(count_by_label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/digits"), metavar="DIR", help="(default: %(default)s)")
    folder = parser.parse_args().data
    if folder.exists():
        print(f"{folder} already exists")
        return
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")  # so that DIR is never incomplete
    try:
        count = write_digits(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {count} images to {folder}")


if __name__ == "__main__":
    main()
