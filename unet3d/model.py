"""The 3D U-Net of the MLPerf Training reference, with any list of filters."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unet3d.spec import CLASSES


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3^3 convolution without bias (the normalisation has one), InstanceNorm, ReLU."""
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.ReLU(inplace=True),
    )


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(_convolution(inputs, outputs, stride), _convolution(outputs, outputs))


class _Up(nn.Module):
    """Transposed 2^3 convolution, then the skip connection, then two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose3d(inputs, outputs, 2, stride=2)
        self.block = _block(2 * outputs, outputs)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.block(torch.cat((self.enlarge(x), skip), dim=1))


class UNet3D(nn.Module):
    """float [n, 1, z, y, x] -> logits [n, 3, z, y, x]; sizes must divide by `divisor`.

    `filters` are the channels of each resolution; below the last lies a bottleneck of as
    many channels as the last. The reference's are 32, 64, 128, 256, 320.
    """

    def __init__(self, filters: Sequence[int], inputs: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        filters = list(filters)
        self.first = _block(inputs, filters[0])
        self.down = nn.ModuleList(_block(a, b, stride=2)
                                  for a, b in zip(filters, [*filters[1:], filters[-1]]))
        wide = [filters[-1], *reversed(filters[1:])]
        self.up = nn.ModuleList(_Up(a, b) for a, b in zip(wide, reversed(filters)))
        self.last = nn.Conv3d(filters[0], classes, 1)
        self.divisor = 2 ** len(filters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for up in self.up:
            x = up(x, levels.pop())
        return self.last(x)
