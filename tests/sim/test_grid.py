"""Groups of a rank grid by strides are slices of the array of all ranks."""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest

from sim.grid import Grid


@pytest.mark.parametrize("seed", range(10))
def test_groups_are_slices_of_the_array(seed: int) -> None:
    """Against numpy's own indexing and transposing."""
    draw = Random(seed)
    order = ("tp", "cp", "dp", "pp")
    grid = Grid.of(order, **{axis: draw.choice((1, 2, 3, 4)) for axis in order})
    names = [axis for axis, _ in reversed(grid.sizes)]
    for count in range(3):
        for axes in combinations(order, count):
            at = {axis: draw.randrange(grid.degree(axis)) for axis in order if axis not in axes and draw.random() < 0.5}
            array = np.arange(grid.world).reshape([grid.degree(axis) for axis in names])
            array = array[tuple(at.get(name, slice(None)) for name in names)]
            left = [name for name in names if name not in at]
            inside = [number for number, name in enumerate(left) if name in axes]
            outside = [number for number, name in enumerate(left) if name not in axes]
            groups = array.transpose(outside + inside).reshape(-1, grid.size(axes))
            assert (grid.groups(axes, at) == groups).all()
            assert all((grid.group(number, axes, at) == group).all() for number, group in enumerate(groups))
            for number, group in enumerate(groups):
                assert (grid.group_of(group, axes, at) == number).all()
                assert grid.are_at(group, at).all()
            assert grid.are_at(np.arange(grid.world), at).sum() == groups.size
