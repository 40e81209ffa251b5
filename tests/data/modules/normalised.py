"""Small nets with batch normalisation, to be trained for real."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """A convolution and its norm beside the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        return x + self.relu(self.norm(self.convolution(x)))


class Net(nn.Module):
    """Images of 8 × 8."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout) if dropout else nn.Identity(), nn.Linear(8 * 36, 10))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 8, 8) to (batch, 10)."""
        result: Tensor = self.head(self.blocks(self.stem(x)))
        return result


def dropping() -> Net:
    """With dropout."""
    return Net(0.3)


class Summed(nn.Module):
    """A number for each image, whose loss is their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Net(), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 8, 8) to (batch, 1)."""
        result: Tensor = self.last(self.net(x))
        return result
