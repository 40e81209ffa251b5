"""The device that a rank computes on, behind one small interface: which, its memory, how work on it is timed.

`class_of(kind)` tells kinds apart, and nothing else does. What measuring, timing and executing need of a device is asked here.
Modules of this room import torch when they are asked for something, and not before.
"""

from __future__ import annotations

from calibration.devices.base import ComputeDevice, Kind

__all__ = ["ComputeDevice", "Kind", "class_of", "device", "present"]


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


def present() -> Kind:
    """cuda where torch finds a GPU."""
    return "cuda" if device("cuda").count() else "cpu"
