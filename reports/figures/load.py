"""Which links of the cluster are busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reports.figures import figure
from reports.figures.timeline_bars import played_as
from reports.figures.topology import drawn_links, joints, prepared, rates_of
from sim.analysis.link_load import carried
from sim.timeline import Timeline
from topologies.cluster import Cluster

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@figure("load")
def load(run: tuple[Cluster, Timeline]) -> Figure:
    """The cluster with each link coloured by the share of its capacity that the step uses (of its busier direction).

    Raises UserError beyond 64 GPUs.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    cluster, timeline = run
    drawn, ax, net, form, layout = prepared(cluster)
    bytes_on, rates = carried(timeline), rates_of(net, form)[0]
    links = [link for link, _, _ in form.links]
    known = np.array([bytes_on[link] if link < len(bytes_on) else 0.0 for link in links])
    busiest: dict[tuple[int, int], float] = {}
    for (_, a, b), used in zip(form.links, (known / rates / timeline.step).tolist(), strict=True):
        ends = (min(a, b), max(a, b))
        busiest[ends] = max(busiest.get(ends, 0.0), used)
    shares = [busiest[min(a, b), max(a, b)] for _, a, b in form.links]
    scale = ScalarMappable(Normalize(0, 100 * max([*shares, 1e-3])), colormaps["viridis_r"])
    colours = [tuple(rgba) for rgba in scale.to_rgba(100 * np.array(shares)).tolist()]
    drawn_links(ax, form, layout, colours, [1.0 + 3.0 * share / max([*shares, 1e-9]) for share in shares])
    joints(ax, form, layout)
    large = max(10.0, 8 * drawn.get_figwidth() / 14)
    bar = drawn.colorbar(scale, ax=ax, shrink=0.8, aspect=16, pad=0.01)
    bar.set_label(f"% of capacity over the step{played_as(timeline)}", size=large)
    bar.ax.tick_params(labelsize=large)
    ax.set_title(f"{cluster.name}: which links the step uses, each in its busier direction", fontsize=large + 1)
    return drawn
