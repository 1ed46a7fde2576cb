"""A small GPT for `penstock plan small_gpt:step --budget 100MiB`, run in this folder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 2000, 192, 256


class Gpt(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def loss_fn(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the losses of all tokens except the first, and their number."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel()


def step() -> tuple[nn.Module, object, Tensor, torch.optim.Optimizer]:
    model = Gpt()
    return model, loss_fn, torch.zeros(16, LENGTH, dtype=torch.int64), torch.optim.AdamW(model.parameters())
