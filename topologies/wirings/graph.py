"""Any node, described edge by edge: what readers of real machines produce, and what irregular ones need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from topologies.board import Board, Path, wirings
from topologies.hardware import Edge, NodeParts

WidestPaths = dict[str, tuple[float, Path]]  # vertex -> narrowest rate on the way, and the way


class _Step(NamedTuple):
    to: str
    kind: str
    rate: float
    link: int


@wirings("graph")
def graph(node: NodeParts) -> Board:
    """Route inside: NVLinks when at most one GPU or switch is between, else over PCIe and sockets, else any NVLinks.

    NCCL ranks ways in this order (NVL, NVB, PIX … SYS in `src/graph/topo.h`). Among equals the shortest, then the widest, then
    the first way wins. A GPU uses the nearest NICs; GPUs that share several share them out.
    """
    return _Graph(node).board


class _Graph:
    def __init__(self, node: NodeParts) -> None:
        self.node, self.board = node, Board(node)
        self.steps: dict[str, list[_Step]] = {f"gpu {gpu}": [] for gpu in range(node.gpus)}
        self.steps |= {f"nic {nic}": [] for nic in range(node.nics)}
        if not node.edges:
            raise ValueError("node.edges is required by wiring='graph'")
        for edge in node.edges:
            self._add(edge)
        for gpu in range(node.gpus):
            self._join(gpu)
        if "nvswitch" in self.steps:
            down = {step.to: step.link for step in self.steps["nvswitch"]}
            up = {gpu: next((s.link for s in self.steps[gpu] if s.to == "nvswitch"), -1) for gpu in self._gpus()}
            if all(up[gpu] >= 0 for gpu in self._gpus()):
                self.board.switch = [((up[gpu],), (down[gpu],)) for gpu in self._gpus()]
        slots = [next((step.link for step in self.steps[gpu] if step.kind == "pcie"), -1) for gpu in self._gpus()]
        if min(slots) >= 0:  # links are numbered there and back
            self.board.slots_of = [(slot, slot ^ 1) for slot in slots]
        if node.nics:
            self._uplink()

    def _gpus(self) -> list[str]:
        return [f"gpu {gpu}" for gpu in range(self.node.gpus)]

    def _add(self, edge: Edge) -> None:
        a, b = edge.ends
        for end in edge.ends:
            if end.startswith(("gpu ", "nic ")) and end not in self.steps:
                raise ValueError(f"node.edges: '{end}' contradicts gpus={self.node.gpus}, nics={self.node.nics}")
        if any(step.to == b and step.kind == edge.kind for step in self.steps.get(a, ())):
            raise ValueError(f"node.edges: '{a}' and '{b}' are joined twice by {edge.kind}; add their rates")
        known = {"nvlink": self.node.gpu.nvlink * edge.count, "pcie": self.node.gpu.pcie}
        rate = edge.rate or known.get(edge.kind, 0.0)
        if not rate:
            raise ValueError(f"node.edges: '{a}' to '{b}' needs a rate: gpu.{edge.kind} is not given either")
        ends = sum(end.startswith("gpu ") for end in edge.ends)  # a way has half of its latency at each GPU
        latency = self.node.latency.host if edge.kind == "host" else getattr(self.node.latency, edge.kind) * ends / 2
        for start, end in ((a, b), (b, a)):
            link = self.board.link(edge.kind, f"{start} to {end} {edge.kind}", rate, latency)
            self.steps.setdefault(start, []).append(_Step(end, edge.kind, rate, link))

    def _join(self, gpu: int) -> None:
        start = f"gpu {gpu}"
        near = self._ways(start, ("nvlink",), lambda vertex: True, hops=2)
        boards = self._ways(start, ("pcie", "host"), _is_fabric)
        far = self._ways(start, ("nvlink",), lambda vertex: True)
        for other, end in enumerate(self._gpus()):
            if other != gpu:
                way = near.get(end) or boards.get(end) or far.get(end)
                if way is None:
                    raise ValueError(f"node.edges: '{start}' cannot reach '{end}'")
                self.board.join(gpu, other, way[1])

    def _ways(self, start: str, kinds: Iterable[str], through: Callable[[str], bool], hops: int = 1 << 30) -> WidestPaths:
        """All ends within `hops` edges of the kinds, by the shortest way and, among equally short ways, the widest."""
        reached: WidestPaths = {start: (float("inf"), ())}
        edge = [start]
        while edge and hops:
            nearest: WidestPaths = {}
            for vertex in edge:
                width, path = reached[vertex]
                for step in self.steps[vertex] if vertex == start or through(vertex) else ():
                    narrow = min(width, step.rate)
                    if step.kind in kinds and step.to not in reached and narrow > nearest.get(step.to, (0.0, ()))[0]:
                        nearest[step.to] = (narrow, (*path, step.link))
            reached |= nearest
            edge, hops = list(nearest), hops - 1
        return reached

    def _uplink(self) -> None:
        ways = {gpu: self._ways(gpu, ("pcie", "host"), _is_fabric) for gpu in self._gpus()}
        nics = [f"nic {nic}" for nic in range(self.node.nics)]
        near: dict[tuple[str, ...], list[str]] = {}  # nearest NICs -> GPUs
        for gpu, reached in ways.items():
            hops = min((len(reached[nic][1]) for nic in nics if nic in reached), default=0)
            if not hops:
                raise ValueError(f"node.edges: '{gpu}' cannot reach a NIC")
            near.setdefault(tuple(nic for nic in nics if nic in reached and len(reached[nic][1]) == hops), []).append(gpu)
        used: dict[str, tuple[str, ...]] = {}
        for shared, gpus in near.items():
            each = max(1, len(shared) // len(gpus))
            first = [i * each if len(shared) >= len(gpus) else i * len(shared) // len(gpus) for i in range(len(gpus))]
            used |= {gpu: shared[at : at + each] for gpu, at in zip(gpus, first, strict=True)}
        nics_used = [nic for bundle in set(used.values()) for nic in bundle]
        if len(set(nics_used)) < len(nics_used):  # a NIC in two bundles: everybody gets one
            used = {gpu: bundle[:1] for gpu, bundle in used.items()}
        bundles = sorted({_numbers(bundle) for bundle in used.values()})
        self.board.rail = [bundles.index(_numbers(used[gpu])) for gpu in self._gpus()]
        out = []
        for gpu in self._gpus():
            away = ways[gpu][used[gpu][0]][1]
            away = away if len(used[gpu]) == 1 else away[:-1]  # the slot of one of several NICs is not the way to all
            out.append((away, tuple(link ^ 1 for link in reversed(away))))  # links are numbered there and back
        self.board.uplink(out, bundles)


def _is_fabric(vertex: str) -> bool:
    """Whether messages pass through: GPUs and NICs are ends."""
    return not vertex.startswith(("gpu ", "nic "))


def _numbers(nics: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(int(nic.removeprefix("nic ")) for nic in nics)
