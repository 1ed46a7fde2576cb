"""Train on HDF5, TFRecord, Parquet, tar, CSV ... : whatever `penstock.open` reads, local or remote.

    python examples/records.py train.h5 --features x --label y
    python examples/records.py "s3://bucket/train-*.tfrecord" --features pixels --label class --cache /scratch/cache

HDF5, Parquet and the like are read by number, and their chunks decompressed once per epoch. TFRecord, tar, CSV and
JSONL are streams: shards and blocks of records are shuffled, and shared out over workers and ranks.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock


def make_loader(args: argparse.Namespace, device: str) -> penstock.DataLoader[Any]:
    fields = {"features": args.features, "label": args.label}
    source = penstock.open(args.path, fields=fields, cache=args.cache, errors="skip" if args.skip else "raise")
    is_stream = isinstance(source, penstock.Stream)
    return penstock.DataLoader(
        source.shuffle(seed=0) if isinstance(source, penstock.Stream) else source,
        batch_size=args.batch_size,
        shuffle=None if is_stream else True,
        num_workers=args.workers,
        device=device,
        errors="skip" if args.skip and not is_stream else "raise",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", help="a file, a folder, a pattern or a URL; `penstock inspect PATH` shows its fields")
    parser.add_argument("--features", required=True, help="the field with the numbers of a sample")
    parser.add_argument("--label", required=True, help="the field with its class")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--cache", help="a folder for copies of remote files")
    parser.add_argument("--skip", action="store_true", help="leave out broken records, and count them")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    loader = make_loader(args, device)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, args.classes)).to(device)
    model(next(iter(loader))["features"].float())  # gives the lazy layer its size
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        correct = total = 0
        for batch in loader:
            scores, labels = model(batch["features"].float()), batch["label"].flatten().long()
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (scores.argmax(1) == labels).sum().item()
            total += len(labels)
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {correct / total:.1%} of {total} samples")


if __name__ == "__main__":
    main()
