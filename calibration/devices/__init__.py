"""The device that a rank computes on, behind one small interface: which, its memory, how work on it is timed.

`device(kind, index)` tells kinds apart. What measuring and timing need of a device is asked here. Modules of this room
import torch when they are asked for something, and not before.
"""

from __future__ import annotations

from calibration.devices.base import ComputeDevice, Kind

__all__ = ["ComputeDevice", "Kind", "device", "present"]


def device(kind: Kind, index: int = 0) -> ComputeDevice:
    """The device of that kind and index."""
    if kind == "cuda":
        from calibration.devices.cuda import CudaDevice

        return CudaDevice(index)
    from calibration.devices.cpu import CpuDevice

    return CpuDevice(index)


def present() -> Kind:
    """cuda where torch finds a GPU."""
    return "cuda" if device("cuda").count() else "cpu"
