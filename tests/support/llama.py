"""A Llama in plain torch, of any size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

F = nn.functional


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_width = heads, key_heads, width // heads
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, key_heads * self.head_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        found: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        query, key, value = (
            rotated(split(self.query(x)), cos, sin),
            rotated(split(self.key(x)), cos, sin),
            self.value(x),
        )
        times = self.heads // self.key_heads
        key, value = key.repeat_interleave(times, 1), split(value).repeat_interleave(times, 1)
        found: Tensor = self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        )
        return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.float().chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).type_as(x)


class Llama(nn.Module):
    def __init__(
        self,
        layers: int,
        *,
        width: int = 4096,
        heads: int = 32,
        key_heads: int | None = None,
        hidden: int = 11008,
        words: int = 32000,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width, heads, key_heads or heads, hidden) for _ in range(layers)])
        self.norm, self.head = Norm(width), nn.Linear(width, words, bias=False)
        self.half_head_width = width // heads // 2
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        exponents = torch.arange(self.half_head_width, device=tokens.device, dtype=torch.float32) / self.half_head_width
        angles = torch.outer(places, 1e4**-exponents)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        found: Tensor = self.head(self.norm(x))
        return found


def summed_tokens(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten(), reduction="sum"), tokens.numel()
