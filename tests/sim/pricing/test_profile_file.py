"""Profiles are written and read back, and refused when their prices were edited."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sim.pricing.prices import Profile
from sim.pricing.profile_file import described, quantity, signed, yaml_text
from sim.pricing.shipped import load_profile, profile_names
from topologies.reading import UserError, build, parse_yaml


@pytest.mark.parametrize("name", profile_names())
def test_profiles_survive_being_written(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    text = yaml_text(described(profile))
    again = build(Profile, parse_yaml(text, tmp_path), name)
    assert yaml_text(described(again)) == text
    assert again.launch == pytest.approx(profile.launch, rel=1e-4)
    assert again.provenance.keys() == profile.provenance.keys()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda text: text, False),
        (lambda text: "# my machine\n" + text.replace("slowdown: ", "slowdown:    "), False),
        (lambda text: text[: text.index("overhead:")] + "overhead: {context: 0 B, communicator: 0 B, reserve: 0.0}\n", True),
        (lambda text: re.sub(r"(?m)^launch: .*", "launch: 9 us", text), True),
        (lambda text: re.sub(r"(?m)^launch: .*", "launch: 9 us", text).partition("\n")[2], False),
    ],
    ids=["as written", "commented", "cut", "edited", "edited and unsigned"],
)
def test_a_profile_that_is_not_as_it_was_written_is_refused(change: Any, refused: bool, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(change(yaml_text(signed(described(load_profile("cpu-gloo"))))))
    if not refused:
        assert load_profile(path).slowdown == load_profile("cpu-gloo").slowdown
        return
    with pytest.raises(UserError, match=r"p\.yaml: digest='\w{16}': the file is not as it was written: cut, or edited by hand"):
        load_profile(path)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "B", "0 B"),
        (1023.0, "B", "1023 B"),
        (1024.0, "B", "1 KiB"),
        (3 * 2.0**20, "B", "3 MiB"),
        (2.0**20 + 1024, "B", "1025 KiB"),
        (80 * 2.0**30, "B", "80 GiB"),
        (4.123456e-4, "s", "412.35 us"),
        (1e-9, "s", "1 ns"),
        (5e-10, "s", "0.5 ns"),
        (2.5, "s", "2.5 s"),
        (1e-3, "s", "1 ms"),
        (1.8e9, "B/s", "1.8 GB/s"),
        (999.0, "B/s", "999 B/s"),
        (1e3, "B/s", "1 kB/s"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (0.5, "FLOP/s", "0.5 FLOP/s"),
    ],
)
def test_quantities_are_written_with_the_largest_unit_that_fits(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_fields_are_written_in_their_order() -> None:
    assert yaml_text({"name": "h100", "launch": 1, "copied": {"second": 2, "first": 1}}).split() == (
        "name: h100 launch: 1 copied: second: 2 first: 1".split()
    )
