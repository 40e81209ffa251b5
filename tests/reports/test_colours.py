"""Colours that mean different things in one figure can be told apart by eyes without one kind of cone, on white and in the dark.

Simulation: Machado, Oliveira & Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency".
Distances are CIE 1976 ΔE*ab.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from reports.figures import COLOURS, HATCHES, LIGHT, MEMORY
from reports.figures.run_timeline import CAUSES

EYES = {
    "all cones": np.eye(3),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
TURN = np.array([[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]])  # hue-rotate(180deg), W3C Filter Effects


def in_the_dark(colour: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the page's style makes of a colour of a figure: invert(0.92) hue-rotate(180deg)."""
    return np.clip(TURN @ (0.92 - 0.84 * colour), 0, 1)


def lab(colour: NDArray[np.float64], eyes: NDArray[np.float64]) -> NDArray[np.float64]:
    light = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(eyes @ light, 0, 1) / (0.95047, 1, 1.08883)
    fx, fy, fz = (value ** (1 / 3) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116 for value in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("palette", [COLOURS, MEMORY, CAUSES])
def test_no_two_colours_of_a_figure_look_alike(eyes: str, dark: bool, palette: dict[str, str]) -> None:
    """What shares a colour has a hatch of its own; light grey is for what is nearly nothing."""
    seen = {}
    for name, colour in palette.items():
        rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        seen[name] = lab(in_the_dark(rgb) if dark else rgb, EYES[eyes])
    for first, second in itertools.combinations(seen, 2):
        if palette[first] == palette[second]:
            assert HATCHES.get(first) != HATCHES.get(second), (first, second)
        elif LIGHT not in (palette[first], palette[second]):
            assert np.linalg.norm(seen[first] - seen[second]) > 9.5, (first, second)
