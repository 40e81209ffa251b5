"""The device that a rank computes on, behind one small interface: which, its memory, how work on it is timed.

`class_of(kind)` tells kinds apart, and nothing else does. What measuring, timing and executing need of a device is asked here.
Modules of this room import torch when they are asked for something, and not before.
"""

from __future__ import annotations

import os
import shutil

from calibration.devices.base import ComputeDevice, Kind

__all__ = ["ComputeDevice", "Kind", "class_of", "device", "present", "unseen"]


def class_of(kind: Kind) -> type[ComputeDevice]:
    """What is known of a kind without a device at hand."""
    if kind == "cuda":
        from calibration.devices.cuda import CudaDevice

        return CudaDevice
    from calibration.devices.cpu import CpuDevice

    return CpuDevice


def device(kind: Kind, index: int = 0) -> ComputeDevice:
    """The device of that kind and index."""
    return class_of(kind)(index)


def unseen() -> str | None:
    """What to say where the driver is installed and torch finds no GPU, unless they are hidden from it."""
    import torch

    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return None
    why = "was built without CUDA" if torch.version.cuda is None else f"was built for CUDA {torch.version.cuda}"
    return (
        f"nvidia-smi is installed, and torch {torch.__version__} {why} and finds no GPU: install one for this driver, or hide "
        "GPUs by CUDA_VISIBLE_DEVICES= and measure cores"
    )


def present() -> Kind:
    """cuda where torch finds a GPU."""
    return "cuda" if device("cuda").count() else "cpu"
