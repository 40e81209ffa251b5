"""Bubbles and microbatches in flight of schedules alone, against closed forms."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from click.testing import CliRunner

import shardyard
from strategies.schedules import schedules
from strategies.schedules.unit_play import unit_play
from topologies.reading import UserError


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 32)])
def test_bubbles_are_those_of_the_papers(ranks: int, microbatches: int) -> None:
    """(p − 1)/m of gpipe and 1f1b, (p − 1)/(v·m) interleaved (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), p − 1 where
    one rank works at a time; zero-bubble H1 leaves (p − 1)(F + B − W), H2 nothing between a rank's passes (Qi et al. 2023,
    arXiv:2401.10241, table 2: of F = B = W).
    """
    for name in ("gpipe", "1f1b"):
        assert unit_play(name, ranks, microbatches).overhead == pytest.approx((ranks - 1) / microbatches)
    assert unit_play("naive", ranks, microbatches).overhead == pytest.approx(ranks - 1)
    for chunks in (2, 4):
        assert unit_play("interleaved", ranks, microbatches, chunks).overhead == pytest.approx(
            (ranks - 1) / (chunks * microbatches)
        )
    assert unit_play("zb-h1", ranks, microbatches).length == pytest.approx(3 * microbatches + ranks - 1)
    if microbatches >= 2 * ranks - 1:
        assert unit_play("zb-h2", ranks, microbatches).gaps == pytest.approx(0.0)


def test_microbatches_that_ranks_hold() -> None:
    assert [unit_play("gpipe", 4, 8).held(rank) for rank in range(4)] == [8, 8, 8, 8]
    assert [unit_play("1f1b", 4, 8).held(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [unit_play("zb-v", 4, 8).held(rank) for rank in range(4)] == [4, 4, 4, 4]  # as much as 1f1b's first rank


@pytest.mark.parametrize("name", list(schedules))
def test_every_schedule_plays_to_its_end(name: str) -> None:
    play = unit_play(name, 4, 8)
    work = sum(each.end - each.start for each in play.passes)
    assert work == pytest.approx(4 * 8 * 3)
    assert 0 <= play.gaps <= play.bubble < 1
    for rank in range(4):  # one pass at a time
        spans = sorted((each.start, each.end) for each in play.passes if each.rank == rank)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))


def test_the_command_draws_and_says(tmp_path) -> None:
    shown = CliRunner().invoke(shardyard.main, ["teach", "1f1b", "zb-v", "gpipe", "--plot", str(tmp_path / "s.png")])
    assert shown.exit_code == 0, shown.output
    assert "27.3 %" in shown.output
    assert (tmp_path / "s.png").stat().st_size > 10_000
    data = json.loads(CliRunner().invoke(shardyard.main, ["teach", "--json"]).stdout)
    assert [each["name"] for each in data] == ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
    assert "did you mean '1f1b'" in CliRunner().invoke(shardyard.main, ["teach", "1f1d"]).output
    with pytest.raises(UserError, match="needs even"):
        unit_play("dualpipe", 3, 8)
