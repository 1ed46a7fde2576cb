"""Classify all images below a folder with the model that images.py has saved, and write a CSV file.

    python examples/images.py data/digits/train --save model.pt
    python examples/batch_inference.py data/digits/test model.pt --out classes.csv

Decoding, the copy to the device, the model and the copy back overlap. An image that cannot be decoded is left out and
counted.
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch
from images import as_floats, make_model  # this folder's
from torch import nn

import penstock


def classify(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    scores = model(as_floats(batch["image"])).softmax(1)
    best = scores.max(1)
    return {"path": batch["path"], "class": best.indices, "score": best.values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path, help="as images.py saves it")
    parser.add_argument("--out", type=Path, default=Path("classes.csv"))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    saved = torch.load(args.model, map_location=device, weights_only=True)
    model = make_model(len(saved["classes"]), saved["depth"]).to(device).eval()
    model.load_state_dict(saved["model"])
    source = penstock.open(args.folder, size=saved["size"], fields=["image", "path"])
    loader: penstock.DataLoader[Any] = penstock.DataLoader(
        source, args.batch_size, num_workers=args.workers, device=device, errors="skip"
    )
    started = time.perf_counter()
    with args.out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "class", "score"])
        for found in penstock.infer(model, loader, forward=classify):
            names = [saved["classes"][number] for number in found["class"].tolist()]
            table.writerows(zip(found["path"], names, found["score"].tolist(), strict=True))
    statistics, seconds = loader.statistics(), time.perf_counter() - started
    print(f"{statistics.samples} images in {seconds:.1f} s, {len(statistics.skipped_indices)} left out: {args.out}")


if __name__ == "__main__":
    main()
