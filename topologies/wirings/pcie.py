"""PCIe tree: GPUs under PCIe switches under host bridges, one per socket, with a link between each two sockets. No NVLink."""

from __future__ import annotations

from topologies.board import Board, Duplex, Path, wirings
from topologies.hardware import NodeParts


@wirings("pcie")
def pcie(node: NodeParts) -> Board:
    """Route inside: up from the GPU's slot to the lowest point in common and down again.

    A switch's uplink is shared by its GPUs, the link between two sockets by all GPUs of both. A NIC sits beside the GPUs that use
    it when one switch holds them all, else on the host bridge of the first of them.
    """
    return _Tree(node).board


class _Tree:
    def __init__(self, node: NodeParts) -> None:
        self.node, self.board = node, Board(node)
        self.per_socket, rest = divmod(node.gpus, node.sockets)
        if rest or (node.gpus_per_switch and self.per_socket % node.gpus_per_switch):
            tree = f"sockets={node.sockets} and gpus_per_switch={node.gpus_per_switch}"
            raise ValueError(f"node.gpus={node.gpus} do not spread evenly over {tree}")
        self.slots = [self.board.port("pcie", f"gpu {gpu} pcie") for gpu in range(node.gpus)]
        switches = node.gpus // node.gpus_per_switch if node.gpus_per_switch else 0
        self.trunks = [self.board.port("pcie", f"switch {i} pcie", latency=0.0) for i in range(switches)]
        self.hosts = {
            (a, b): self.board.link("host", f"socket {a} to {b}", node.host, node.latency.host)
            for a in range(node.sockets)
            for b in range(node.sockets)
            if a != b
        }
        for a in range(node.gpus):
            for b in range(node.gpus):
                if a != b:
                    self.board.join(a, b, self._between(a, b))
        self.board.host = [self._rise(gpu) for gpu in range(node.gpus)]
        self.board.uplink([self._to_nic(gpu) for gpu in range(node.gpus)])

    def _switch(self, gpu: int) -> int:
        """Number of the GPU's switch; without switches, every GPU by itself."""
        return gpu // (self.node.gpus_per_switch or 1)

    def _rise(self, gpu: int) -> tuple[Path, Path]:
        """From the GPU to its host bridge, and back."""
        chain: list[Duplex] = [self.slots[gpu]] + ([self.trunks[self._switch(gpu)]] if self.trunks else [])
        return tuple(out for out, _ in chain), tuple(into for _, into in reversed(chain))

    def _cross(self, source: int, destination: int) -> Path:
        a, b = source // self.per_socket, destination // self.per_socket
        return () if a == b else (self.hosts[a, b],)

    def _between(self, a: int, b: int) -> Path:
        if self._switch(a) == self._switch(b):
            return self.slots[a][0], self.slots[b][1]
        return *self._rise(a)[0], *self._cross(a, b), *self._rise(b)[1]

    def _to_nic(self, gpu: int) -> tuple[Path, Path]:
        node = self.node
        users = [g for g in range(node.gpus) if g * node.rails // node.gpus == gpu * node.rails // node.gpus]
        if len({self._switch(user) for user in users}) == 1:
            return (self.slots[gpu][0],), (self.slots[gpu][1],)
        away, back = self._rise(gpu)
        return (*away, *self._cross(gpu, users[0])), (*self._cross(users[0], gpu), *back)
