"""Reductions in the switch among more members of a node than prices were measured with: a rack's 72 instead of 8.

NCCL's kernel hands a piece from warps that copy it in to those that reduce and multicast it and to those that copy it out
(github.com/NVIDIA/nccl src/device/all_reduce.h): two loops go by in which not all of them work. A loop moves a chunk for each
channel and member (src/enqueue.cc, calcCollChunking, at 2.26), and so nine times as much among 72 members as among 8, in whose
measured prices theirs are. What links reach there is NCCL's own figure, a protocol of its own in the profile ("in_switch_rack").
"""

from __future__ import annotations

MEASURED = 8  # members of the nodes whose prices were measured
CHANNELS = 24  # of one NVLink domain (src/transport/nvls.cc: NVLS_NCHANNELS_SM100_NVL)
KIB = 1024
SHORTER = ((64, 64 * KIB), (8, 32 * KIB), (2, 16 * KIB))  # messages of fewer loops have chunks of at most so many bytes
STAGES = 3


def filling(members: int, size: float) -> float:
    """Bytes of a message that stages wait for at its beginning or end, beyond those that they do among MEASURED members."""
    return (STAGES - 1) * max(0.0, loop(members, size) - loop(MEASURED, size))


def loop(members: int, size: float) -> float:
    """Bytes of a message of `size` bytes that one loop moves."""
    chunk = 128 * KIB  # NCCL_NVLS_CHUNKSIZE
    for loops, shorter in SHORTER:
        if size < loops * members * CHANNELS * chunk:
            chunk = min(chunk, shorter)
    return min(size, float(members * CHANNELS * chunk))
