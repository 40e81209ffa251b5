"""Profiles are written and read back, and refused when their prices were edited."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sim.pricing.prices import Profile
from sim.pricing.profile_file import described, signed, yaml_text
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
