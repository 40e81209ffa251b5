"""Where the parts of a cluster are drawn: in rows from the GPUs up to the spine, or as the torus or the circle that they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np

from topologies.links.topology import Topology, kind_of_link
from topologies.overview import Shape

Place = tuple[float, float]
Near = Mapping[int, set[int]]  # joint -> joints at the other end of its links
_INSIDE = {"pcie", "host"}
_ROW, _WIDE = 1.5, 30  # height of a row; GPUs beside each other from which on rows of the fabric are twice as high
_APART = 0.6  # of the places over which switches could be spread evenly, at least: those of a rail are all in the middle


class Layout(NamedTuple):
    """places and labels by joint; captions: what a row of numbers is; around: the torus's wrap-around links."""

    places: list[Place]
    labels: list[str]
    captions: tuple[tuple[Place, str], ...] = ()
    around: frozenset[tuple[int, int]] = frozenset()


def arrange(net: Topology, form: Shape, dims: tuple[int, ...]) -> Layout:
    """A layout for `form`; dims: of the torus, if it is one."""
    if any(joint.gpu < 0 for joint in form.joints):
        return _Rows(net, form).layout()
    numbers = range(len(form.joints))
    labels = [str(number) for number in numbers]
    if len(dims) in (2, 3):
        at = np.stack(np.unravel_index(np.arange(len(numbers)), dims, order="F"), axis=1)
        around = frozenset((a, b) for _, a, b in form.links if np.abs(at[a] - at[b]).sum() > 1)
        return Layout([_grid(place, (*dims, 1)) for place in at.tolist()], labels, around=around)
    radius = max(2.0, len(numbers) / 5)
    angles = [2 * pi * number / len(numbers) for number in numbers]
    return Layout([(radius * sin(angle), radius * cos(angle)) for angle in angles], labels)


def _grid(at: list[int], dims: tuple[int, ...]) -> Place:
    """The third dimension goes back into the picture, by less than one step of the others in all."""
    x, y, z = (*at, 0)[:3]
    return 1.6 * x + z * 1.25 / dims[2], -1.6 * y + z * 1.0 / dims[2]


class _Rows:
    """GPUs side by side, the switch between them below, PCIe above and the fabric above that."""

    def __init__(self, net: Topology, form: Shape) -> None:
        self.net, self.form = net, form
        self.near: dict[int, set[int]] = defaultdict(set)
        self.kinds: dict[int, set[str]] = defaultdict(set)
        inside: dict[int, set[int]] = defaultdict(set)
        for link, *ends in form.links:
            kind = kind_of_link(net.kinds[int(net.kind(np.array([link]))[0])])
            for joint, other in (ends, ends[::-1]):
                self.near[joint].add(other)
                self.kinds[joint].add(kind)
                if kind in _INSIDE:
                    inside[joint].add(other)
        self.gpus = [number for number, joint in enumerate(form.joints) if joint.gpu >= 0]
        below = [joint for joint in self.near if joint not in self.gpus and self.kinds[joint] <= {"nvlink", "loopback"}]
        self.row = _distances(self.gpus, inside, ())
        self.top = max(self.row.values())
        ways_out = [joint for joint in self.row if "nic" in self.kinds[joint]]
        outside = _distances(ways_out, self.near, {*self.row, *below})
        self.row |= {joint: self.top + far for joint, far in outside.items() if far} | dict.fromkeys(below, -1)

    def layout(self) -> Layout:
        """Places from the GPUs outwards, each part above the middle of what it is joined to."""
        node = self.net.node_of(np.array(self.gpus))
        places = {gpu: (gpu + 0.9 * int(node[gpu]), 0.0) for gpu in self.gpus}
        joints = range(len(self.form.joints))
        labels = [self._label(joint) for joint in joints]
        captions: list[tuple[Place, str]] = [((-1.3, 0.0), "GPU")]
        steeper = _ROW * min(2.0, len(self.gpus) / _WIDE)  # where links of the fabric go far
        for row in sorted(set(self.row.values()) - {0}, key=abs):
            members = [joint for joint in joints if self.row.get(joint) == row]
            apart = 1.0 if all(labels[joint].isdigit() for joint in members) else 2.2
            _spread(places, members, self.near, row * _ROW + max(0, row - self.top) * steeper, apart)
            if any(labels[joint].isdigit() for joint in members):
                captions.append(((min(places[joint][0] for joint in members) - 1.3, row * _ROW), "NIC"))
        return Layout([places[joint] for joint in joints], labels, tuple(captions))

    def _label(self, joint: int) -> str:
        """GPUs and NICs by their number in the node, switches by what meets there."""
        if joint in self.gpus:
            node = self.net.node_of(np.array(self.gpus))
            return str(joint - int((node < node[joint]).sum()))
        kinds, names = self.kinds[joint], [self.net.name(link).split() for link in self.form.joints[joint].leaving]
        if self.row.get(joint, 0) > self.top:
            known = {" ".join(name[:2]) for name in names if name[0] in ("leaf", "pod") and name[-1] != "down"}
            known |= {f"router {name[1]}.{name[3]}" for name in names if name[0] == "group"}
            return min(known) if known else "switch" if "nic" in kinds else "spine"
        if kinds <= {"nvlink"}:
            return "NVSwitch"
        if "host" in kinds or kinds <= {"loopback"}:
            return "socket" if "host" in kinds else "memory"
        nics = [name[3] for name in names if "nic" in name and name[-1] == "out"]
        return nics[0] if len(nics) == 1 else "PCIe"


def _distances(start: Iterable[int], near: Near, blocked: Collection[int]) -> dict[int, int]:
    """Links to the nearest of `start`, without passing `blocked`."""
    distances = dict.fromkeys(start, 0)
    edge = list(distances)
    while edge:
        following = dict.fromkeys(b for a in edge for b in sorted(near.get(a, ())) if b not in distances and b not in blocked)
        distances |= dict.fromkeys(following, distances[edge[0]] + 1)
        edge = list(following)
    return distances


def _spread(places: dict[int, Place], row: list[int], near: Near, y: float, apart: float) -> None:
    """Every joint of a row at the middle of what it is joined to, but no two of them closer than `apart`, or over the width of
    all that they are joined to.
    """
    known = {joint: [places[other][0] for other in near[joint] if other in places] for joint in row}
    below = [x for xs in known.values() for x in xs]
    if below:
        apart = max(apart, _APART * (max(below) - min(below)) / len(row))
    middle = {joint: sum(xs) / max(1, len(xs)) for joint, xs in known.items()}
    order = sorted(row, key=lambda joint: (middle[joint], joint))
    xs: list[float] = []
    for joint in order:
        xs.append(max(middle[joint], xs[-1] + apart) if xs else middle[joint])
    shift = sum(middle.values()) / len(row) - sum(xs) / len(xs)
    places |= {joint: (x + shift, y) for joint, x in zip(order, xs, strict=True)}
