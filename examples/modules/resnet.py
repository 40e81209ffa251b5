"""ResNets (arXiv:1512.03385) as modules of one's own, traced: the textbook's data parallelism, ResNet-50 on 1 to 256 GPUs.

    shardyard simulate --model examples/modules/resnet.py:resnet50 --input 3x224x224 --cluster dgx-a100 \
        --set plan.microbatch=128
    python examples/modules/resnet.py
    shardyard execute --model examples/modules/resnet.py:resnet18_cifar --input 3x32x32 --cluster cpu-gloo \
        --set plan.precision=fp32 --set plan.microbatch=8
"""

from __future__ import annotations

from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions, to `middle` channels and back, and the input added."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.Conv2d(channels, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(inplace=True))
        square = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.square = nn.Sequential(square, nn.BatchNorm2d(middle), nn.ReLU(inplace=True))
        self.wide = nn.Sequential(nn.Conv2d(middle, 4 * middle, 1, bias=False), nn.BatchNorm2d(4 * middle))
        alike = stride == 1 and channels == 4 * middle
        shortcut = nn.Sequential(nn.Conv2d(channels, 4 * middle, 1, stride, bias=False), nn.BatchNorm2d(4 * middle))
        self.shortcut = nn.Identity() if alike else shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, 4 · middle, height / stride, width / stride)."""
        result: Tensor = self.relu(self.wide(self.square(self.narrow(x))) + self.shortcut(x))
        return result


class Basic(nn.Module):
    """Two convolutions, and the input added."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        first, second = nn.Conv2d(channels, middle, 3, stride, 1, bias=False), nn.Conv2d(middle, middle, 3, 1, 1, bias=False)
        self.first = nn.Sequential(first, nn.BatchNorm2d(middle), nn.ReLU(inplace=True))
        self.second = nn.Sequential(second, nn.BatchNorm2d(middle))
        alike = stride == 1 and channels == middle
        shortcut = nn.Sequential(nn.Conv2d(channels, middle, 1, stride, bias=False), nn.BatchNorm2d(middle))
        self.shortcut = nn.Identity() if alike else shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, middle, height / stride, width / stride)."""
        result: Tensor = self.relu(self.second(self.first(x)) + self.shortcut(x))
        return result


class ResNet(nn.Module):
    """A stem, four groups of blocks of a kind, and a classifier. small: for images of 32 × 32, whose size the stem leaves."""

    def __init__(
        self, kind: type[nn.Module], wider: int, counts: tuple[int, ...], classes: int = 1000, small: bool = False
    ) -> None:
        super().__init__()
        first = nn.Conv2d(3, 64, 3, 1, 1, bias=False) if small else nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(64), nn.ReLU(inplace=True), pool)
        blocks, channels = [], 64
        for group, count in enumerate(counts):
            middle = 64 * 2**group
            for number in range(count):
                blocks.append(kind(channels, middle, 2 if group and not number else 1))
                channels = wider * middle
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes)."""
        result: Tensor = self.classifier(self.pool(self.blocks(self.stem(x))).flatten(1))
        return result


def resnet50() -> ResNet:
    """25.6 million parameters."""
    return ResNet(Bottleneck, 4, (3, 4, 6, 3))


def resnet18() -> ResNet:
    """11.7 million parameters."""
    return ResNet(Basic, 1, (2, 2, 2, 2))


def resnet18_cifar() -> ResNet:
    """11.2 million parameters: for images of 32 × 32 of ten classes."""
    return ResNet(Basic, 1, (2, 2, 2, 2), classes=10, small=True)


def main() -> None:
    """Images per second as GPUs are added, 128 images on each."""
    from shardyard import read_job, simulate, summarise

    print("GPUs  step in ms  images/s  of linear  exposed")
    alone = 0.0  # images per second of one GPU
    for gpus in (1, 8, 16, 64, 256):
        node = {"gpus": min(8, gpus), "nics": min(8, gpus)}
        cluster = {"based_on": "dgx-a100", "nodes": max(1, gpus // 8), "node": node}
        plan = {"microbatch": 128, "accumulation": 1}
        summary = summarise(simulate(read_job(None, model=resnet50, input="3x224x224", plan=plan, cluster=cluster)))
        images = 128 * gpus / summary.step_seconds
        alone = alone or images
        linear = images / gpus / alone
        print(f"{gpus:4}  {1e3 * summary.step_seconds:10.1f}  {images:8,.0f}  {linear:9.1%}  {summary.exposed:7.1%}")


if __name__ == "__main__":
    main()
