"""The net of PyTorch's CIFAR-10 tutorial (a LeNet of 1998 for colour images): the textbook's first data parallelism.

shardyard simulate --model examples/modules/lenet.py:lenet --input 3x32x32 --cluster dgx-a100 --set plan.microbatch=64
python examples/modules/lenet.py
"""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions with pooling, three linear layers (pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html)."""

    def __init__(self, channels: int = 3, side: int = 32, classes: int = 10) -> None:
        super().__init__()
        seen = (((side - 4) // 2) - 4) // 2
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * seen**2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, side, side) to (batch, classes)."""
        result: Tensor = self.classifier(self.convolutions(x).flatten(1))
        return result


def lenet() -> LeNet:
    """CIFAR-10: 62,006 parameters."""
    return LeNet()


def mnist() -> LeNet:
    """The same for MNIST's 28 × 28 grey pixels: 44,426 parameters."""
    return LeNet(channels=1, side=28)


def main() -> None:
    """An epoch of CIFAR-10's 50,000 images as GPUs are added: 64 images on each, and 64 on all together."""
    from shardyard import read_job, simulate, summarise

    print("GPUs  images of a GPU  step in ms  epoch in s  launches, in % of the step")
    for gpus, batch in ((1, 64), (2, 64), (8, 64), (2, 32), (8, 8)):
        node = {"based_on": "dgx-a100", "node": {"gpus": gpus, "nics": gpus}}
        plan = {"microbatch": batch, "accumulation": 1, "precision": "fp32"}
        job = read_job(None, model=lenet, input="3x32x32", plan=plan, cluster=node)
        summary = summarise(simulate(job))
        epoch = 50_000 / (batch * gpus) * summary.step_seconds
        launches = summary.breakdown.get("launch", 0.0) / summary.step_seconds
        print(f"{gpus:4}  {batch:15}  {1e3 * summary.step_seconds:10.2f}  {epoch:10.2f}  {launches:26.0%}")


if __name__ == "__main__":
    main()
