"""Train a small GPT on the bytes of a text file, and continue a prompt with it.

    python examples/text_gpt.py some.txt --prompt "It was"

The text is stored once as an array of tokens, of which samples are windows. The step is a TrainStep: when memory runs
out, it is taken again in smaller parts, with the same gradients. --compile compiles the model first.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_gpt import Gpt, loss_fn  # this folder's
from torch import Tensor, nn

import penstock


def write_tokens(text: Path) -> Path:
    """Store the text's bytes as tokens beside it. (`penstock.Tokenized` uses a tokenizer instead.)"""
    tokens = text.with_suffix(".npy")
    np.save(tokens, np.frombuffer(text.read_bytes(), np.uint8).astype(np.uint16))
    return tokens


@torch.no_grad()
def continue_text(model: nn.Module, prompt: str, count: int, length: int, device: str) -> str:
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(count):
        likely: Tensor = model(tokens[:, -length:])[:, -1, :256].argmax(1, keepdim=True)
        tokens = torch.cat([tokens, likely], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample (256 at most)")
    parser.add_argument("--depth", type=int, default=4, help="layers")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="windows of an array need none")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="train with torch.compile")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    source = penstock.open(write_tokens(args.text), length=args.length, step=args.length // 2, as_dtype="int64")
    loader: penstock.DataLoader[Any] = penstock.DataLoader(
        source, args.batch_size, shuffle=True, num_workers=args.workers, device=device, seed=0
    )
    model = Gpt(args.depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained: Any = torch.compile(model, backend=args.compile) if args.compile else model
    step = penstock.TrainStep(
        trained, optimizer, lambda model, batch: loss_fn(model, batch["tokens"]), clip_grad_norm=1.0
    )
    print(f"{len(source)} windows of {args.length} tokens, {sum(p.numel() for p in model.parameters())} parameters")
    for epoch in range(args.epochs):
        losses = [step(batch) for batch in loader]
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f} per byte")
    print(continue_text(model.eval(), args.prompt, 40, args.length, device))


if __name__ == "__main__":
    main()
