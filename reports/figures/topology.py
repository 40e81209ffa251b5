"""A cluster drawn: GPUs, switches, NICs and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.figures import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, SKY, WHITE, canvas, figure
from reports.figures.cluster_layout import Layout, arrange
from reports.formatting import digits
from topologies.cluster import Cluster, UnequalCluster
from topologies.fabric import fabrics
from topologies.links.topology import Topology, kind_of_link
from topologies.overview import Shape, shape
from topologies.reading import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.pricing.transfers.path_latency import Floats

DRAWN = 64  # GPUs
LINKS = {"nvlink": GREEN, "pcie": ORANGE, "host": DARK, "loopback": PURPLE, "nic": BLUE, "spine": RED}


@figure("topology")
def topology(cluster: Cluster) -> Figure:
    """GPUs, switches, NICs and the links between them; the wider a link, the faster. Raises UserError beyond 64 GPUs."""
    from matplotlib.lines import Line2D

    drawn, ax, net, form, layout = prepared(cluster)
    rates, kinds = rates_of(net, form)
    widths = _widths(rates)
    drawn_links(ax, form, layout, [LINKS[kind] for kind in kinds], widths)
    used = sorted(
        set(zip(kinds, rates.tolist(), widths, strict=True)), key=lambda entry: (list(LINKS).index(entry[0]), -entry[1])
    )
    joints(ax, form, layout)
    named = [(f"{kind} {digits(rate / 1e9)} GB/s", LINKS[kind], width) for kind, rate, width in used]
    handles = [Line2D([], [], color=colour, linewidth=width, label=label) for label, colour, width in named]
    large = max(9.0, 9 * drawn.get_figwidth() / 14)  # a wide drawing is shown smaller
    drawn.legend(handles=handles, loc="outside lower center", ncols=min(5, max(1, len(handles))), fontsize=large)
    groups = [
        (f"{group.count} nodes of " if group.count > 1 else "") + f"{len(group.gpus)} {group.node.gpu.name}"
        for group in cluster.groups
    ]
    ax.set_title(f"{cluster.name}: {', '.join(groups)}", fontsize=large + 1)
    return drawn


def prepared(cluster: Cluster) -> tuple[Figure, Axes, Topology, Shape, Layout]:
    """An empty drawing of the right size, and what goes where on it. Raises UserError beyond 64 GPUs."""
    if cluster.gpus > DRAWN:
        raise UserError(f"{cluster.name}: {cluster.gpus} GPUs are too many to draw; at most {DRAWN}, with --nodes for example")
    net, form = _seen(cluster)
    layout = arrange(net, form, getattr(cluster.fabric, "dims", ()))
    xs, ys = zip(*layout.places, strict=True)
    size = 0.36 * (max(xs) - min(xs)) + 2.5, 0.75 * (max(ys) - min(ys)) + 2.2
    drawn, ax = canvas(min(22, max(7.2, size[0])), min(12, max(3.4, size[1])))
    ax.set_axis_off()
    margin = (2.4, 1.2) if layout.captions else (0.9, 0.7)
    ax.set(xlim=(min(xs) - margin[0], max(xs) + 0.9), ylim=(min(ys) - margin[1], max(ys) + margin[1]))
    return drawn, ax, net, form, layout


def joints(ax: Axes, form: Shape, layout: Layout) -> None:
    """GPUs, switches and NICs with their names, larger on a wide drawing, which is shown smaller."""
    size = min(12.5, max(8.0, 8 * ax.get_figure(root=True).get_figwidth() / 14))  # type: ignore[union-attr]
    for joint, (x, y), label in zip(form.joints, layout.places, layout.labels, strict=True):
        shape_of, colour = ("circle", SKY) if joint.gpu >= 0 else ("square" if label.isdigit() else "round", WHITE)
        look = {"boxstyle": f"{shape_of},pad=0.35", "facecolor": colour, "edgecolor": DARK, "linewidth": 0.8}
        ax.text(x, y, label, ha="center", va="center", fontsize=size, zorder=3, bbox=look)
    for (x, y), text in layout.captions:
        ax.text(x, y, text, ha="right", va="center", fontsize=size + 1, color=DARK)


def _seen(cluster: Cluster) -> tuple[Topology, Shape]:
    """The topology and the links to draw; of one node also those that only traffic to a second one would use."""
    if cluster.nodes > 1 or isinstance(cluster, UnequalCluster) or not cluster.node.nics:
        net = cluster.topology()
        return net, shape(net)
    net = cluster.model_copy(update={"nodes": 2, "fabric": fabrics["single"]()}).topology()
    form = shape(net)
    links = [entry for entry in form.links if net.name(entry[0]).startswith("node 0 ")]
    kept = sorted({*range(cluster.gpus), *(joint for _, *ends in links for joint in ends)})
    number = {joint: place for place, joint in enumerate(kept)}
    joints = tuple(form.joints[joint] for joint in kept)
    return net, Shape(joints, tuple((link, number[a], number[b]) for link, a, b in links))


def rates_of(net: Topology, form: Shape) -> tuple[Floats, list[str]]:
    """Bytes per second and kind of every link of a drawing."""
    links = np.array([link for link, _, _ in form.links], dtype=np.int64)
    return net.capacity(links), [kind_of_link(net.kinds[kind]) for kind in net.kind(links)]


def _widths(rates: Floats) -> list[float]:
    """The wider a line, the faster."""
    spread = np.log(rates / rates.min(initial=np.inf)) / max(1.0, float(np.log(rates.max(initial=0) / rates.min(initial=np.inf))))
    widths: list[float] = (0.8 + 1.8 * spread).tolist()
    return widths


def drawn_links(ax: Axes, form: Shape, layout: Layout, colours: Sequence[Any], widths: Sequence[float]) -> None:
    """Draw every pair of joints once; of the two directions the first that comes."""
    seen = set()
    for (_, a, b), colour, width in zip(form.links, colours, widths, strict=True):
        if (b, a, colour) not in seen:
            seen.add((a, b, colour))
            _line(ax, form, layout, (a, b), colour, width)


def _line(ax: Axes, form: Shape, layout: Layout, ends: tuple[int, int], colour: Any, width: float) -> None:
    """A line; in a row of parts an arc, below GPUs and above all else; a link around a torus as two stubs."""
    from matplotlib.patches import FancyArrowPatch

    a, b = sorted(ends, key=lambda joint: layout.places[joint])
    (x1, y1), (x2, y2) = layout.places[a], layout.places[b]
    far = max(abs(x2 - x1), abs(y2 - y1))
    if ends in layout.around:
        for (x, y), sign in (((x1, y1), -1), ((x2, y2), 1)):
            step = 0.55 * sign / far
            ax.plot([x, x + step * (x2 - x1)], [y, y + step * (y2 - y1)], ":", color=colour, linewidth=width, zorder=1)
        return
    in_row = y1 == y2 and bool(layout.captions)
    bend = min(0.35, 2.2 / far) * (1 if form.joints[a].gpu >= 0 else -1) if in_row else 0.0
    arc = f"arc3,rad={bend}"
    style: dict[str, Any] = {"arrowstyle": "-", "color": colour, "linewidth": width, "zorder": 1}
    ax.add_patch(FancyArrowPatch((x1, y1), (x2, y2), connectionstyle=arc, **style))
