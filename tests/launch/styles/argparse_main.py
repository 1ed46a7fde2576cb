"""A main function with arguments, spawned workers, a validation loader and a learning-rate schedule."""

import argparse
import logging
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Squares(Dataset):
    """Numbers and their squares, augmented by each library's own random numbers."""

    def __len__(self):
        return 120

    def __getitem__(self, index):
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        x = torch.tensor([index / 120 + 0.001 * noise])
        return {"x": x, "y": x * x, "name": f"sample {index}"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--start-method", default="spawn")
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s %(message)s")
    log = logging.getLogger("train")
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    training, validation = random_split(Squares(), [100, 20])
    loaders = [
        DataLoader(part, batch_size=10, shuffle=shuffle, num_workers=2, multiprocessing_context=args.start_method)
        for part, shuffle in ((training, True), (validation, False))
    ]
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=args.epochs * len(loaders[0]))
    for epoch in range(args.epochs):
        for batch in loaders[0]:
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            log.info("%d %.9f %s", epoch, loss.item(), batch["name"][0])
        with torch.no_grad():
            held_out = sum(nn.functional.mse_loss(model(b["x"]), b["y"]).item() for b in loaders[1])
        print(f"epoch {epoch}: held out {held_out:.9f}", file=sys.stderr)


if __name__ == "__main__":
    main()
