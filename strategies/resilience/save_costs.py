"""How long a job's checkpoint takes to save and to read, in each place that its cluster has."""

from __future__ import annotations

from sim.runs.transfer import shared_seconds
from strategies.job import Job
from strategies.resilience.checkpoint_size import CheckpointSize
from strategies.resilience.checkpointing import SaveCosts
from topologies.storage import Storage

BUFFERS = 4  # of a node's part in its memory: its own and a neighbour's, each while the next is written (GEMINI, SOSP 2023)


def save_costs(job: Job, size: CheckpointSize, storage: Storage, overhead: float = 0.0, parallel_load: bool = False) -> SaveCosts:
    """Seconds by place. Copies from GPUs run at the slots' PCIe rate; nodes share the storage max-min fairly. overhead: of each
    save besides. parallel_load: each node reads as large a part of the checkpoint, and gets what it lacks over its NICs
    (Megatron-LM's --ckpt-fully-parallel-load, ByteCheckpoint); otherwise each reads all that it needs.
    """
    node, nodes = job.cluster.node, job.cluster.nodes
    write = (
        shared_seconds(size.write.tolist(), _limit(storage.node_write), storage.in_all(storage.write, nodes)) + storage.latency
    )
    once = min(size.total / nodes, float(size.read.max()))
    reads = [once] * nodes if parallel_load else size.read.tolist()
    read = shared_seconds(reads, _limit(storage.node_read), storage.in_all(storage.read, nodes)) + storage.latency
    if parallel_load and nodes > 1 and node.nics:
        read += (float(size.read.max()) - once) / (node.nic * node.nics)
    copy = size.largest_rank / node.pcie if node.pcie else 0.0
    read_node = float(size.read.max())
    disk = disk_read = peer = None
    if node.cpu is not None and node.cpu.disk and node.cpu.disk >= 2 * size.busiest_node:  # the old one and the new
        disk, disk_read = size.busiest_node / node.cpu.disk_write, read_node / node.cpu.disk_read
    if nodes > 1 and node.nics and node.cpu is not None and node.cpu.memory >= BUFFERS * size.busiest_node:
        peer = size.busiest_node / (node.nic * node.nics)
    peer_read = max(copy, read_node / (node.nic * node.nics)) if peer is not None else 0.0
    return SaveCosts(copy + overhead, write, read, disk, disk_read or 0.0, peer, peer_read)


def _limit(rate: float) -> float:
    return rate or float("inf")
