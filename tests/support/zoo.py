"""Small models of many kinds, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, Callable[[nn.Module, Any], tuple[Tensor, int]], Any]
F = nn.functional


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(x)


def per_token(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum"), tokens.numel()


def images(size: int = 4, side: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, side, side), torch.randint(0, 10, (size,))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)])
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(64, 16, 3, padding=1), nn.Conv2d(32, 10, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for conv in self.down:
            x = torch.relu(conv(x))
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = torch.relu(conv(torch.cat([x, kept.pop()], 1)))
        return x.mean((2, 3))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (one.view(b, t, self.heads, -1).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, 64), nn.Embedding(64, 64)
        self.layers = nn.ModuleList([Attention(64, 4, causal=True) for _ in range(2)])
        self.head = nn.Linear(64, 256, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        found: Tensor = self.head(x)
        return found


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.layers = nn.Sequential(*[Attention(64, 4, causal=False) for _ in range(2)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
        return found


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.body = nn.Transformer(64, 4, 1, 1, 128, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        found: Tensor = self.head(self.body(x, x))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(256, 64),
            nn.LSTM(64, 128, 2, batch_first=True),
            nn.Linear(128, 256),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return found


class Graph(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 10)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, source, target = batch["nodes"], batch["source"], batch["target"]
        for layer in self.message:
            sent = torch.relu(layer(x)).gather(1, source[..., None].expand(-1, -1, 32))
            x = x + torch.zeros_like(x).scatter_add(1, target[..., None].expand(-1, -1, 32), sent)
        found: Tensor = self.head(x.mean(1))
        return found


class Experts(nn.Module):
    """Every expert sees every sample, weighted by a gate: dense, as sizes must not depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        found: Tensor = self.head(mixed)
        return found


class Routed(nn.Module):
    """Sends samples to one of two layers by their values: sizes that no fake tensor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0] > 0
        found: Tensor = self.head(torch.cat([self.layers[0](x[first]), self.layers[1](x[~first])]))
        return found


def graph_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch), batch["labels"], reduction="sum"), len(batch["labels"])


def amp(loss: Callable[[nn.Module, Any], tuple[Tensor, int]]) -> Callable[[nn.Module, Any], tuple[Tensor, int]]:
    def under_autocast(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return under_autocast


def tokens(size: int = 4) -> Tensor:
    return torch.randint(0, 256, (size, 64))


def graph(size: int = 4) -> dict[str, Tensor]:
    edges = {key: torch.randint(0, 40, (size, 120)) for key in ("source", "target")}
    return {"nodes": torch.randn(size, 40, 32), **edges, "labels": torch.randint(0, 10, (size,))}


def vectors(size: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 64), torch.randint(0, 10, (size,))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *[Residual(32) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


ZOO: dict[str, Callable[[], Case]] = {
    "MLP": lambda: (mlp(), classify, vectors(64)),
    "MLP, AMP": lambda: (mlp(), amp(classify), vectors(64)),
    "ResNet-like": lambda: (cnn(), classify, images()),
    "ResNet-like, AMP": lambda: (cnn(), amp(classify), images()),
    "U-Net": lambda: (UNet(), classify, images()),
    "ViT": lambda: (ViT(), classify, images()),
    "ViT, AMP": lambda: (ViT(), amp(classify), images()),
    "GPT-like": lambda: (GPT(), per_token, tokens()),
    "GPT-like, checkpointed": lambda: (GPT(checkpointed=True), per_token, tokens()),
    "GPT-like, AMP": lambda: (GPT(), amp(per_token), tokens()),
    "encoder-decoder": lambda: (Translator(), per_token, tokens()),
    "GNN-like scatter": lambda: (Graph(), graph_loss, graph()),
    "MoE": lambda: (Experts(), classify, vectors(64)),
    "LSTM": lambda: (Recurrent(), per_token, tokens()),
    "routed by value": lambda: (Routed(), classify, vectors(64)),
}
