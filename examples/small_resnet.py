"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015): resnet(classes=10, depth=50)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""By the depth: how many blocks each of the four stages has."""


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow, self.middle, self.wide = (
            conv(inputs, width, 1),
            conv(width, width, 3, stride),
            conv(width, 4 * width, 1),
        )
        self.shortcut = conv(inputs, 4 * width, 1, stride) if stride > 1 or inputs != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.wide(F.relu(self.middle(F.relu(self.narrow(x))))) + self.shortcut(x))


def resnet(classes: int, depth: int = 50, width: int = 64) -> nn.Sequential:
    """Return a network for (batch, 3, height, width) images; 50 and 64 are ResNet-50."""
    layers: list[nn.Module] = [conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, blocks in enumerate(BLOCKS[depth]):
        for number in range(blocks):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not number else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
