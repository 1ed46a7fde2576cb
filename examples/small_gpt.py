"""A small GPT, to plan: `penstock plan small_gpt:step --budget 100MiB`, in this folder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, LENGTH = 2000, 192, 256


class Gpt(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.last(x)


def loss_fn(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the losses of all tokens but the first, and how many they are."""
    found = model(tokens[:, :-1])
    return F.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel()


def step() -> tuple[nn.Module, object, Tensor, torch.optim.Optimizer]:
    model = Gpt()
    return model, loss_fn, torch.zeros(16, LENGTH, dtype=torch.int64), torch.optim.AdamW(model.parameters())
