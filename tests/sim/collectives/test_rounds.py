"""All-reduces round by round, against what is known of them."""

from __future__ import annotations

from math import log2
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import shardyard
from sim.analysis.collective_rounds import collective_rounds
from topologies.reading import UserError


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ring_has_2_n_1_rounds_and_each_rank_sends_as_much(n: int) -> None:
    play = collective_rounds("all_reduce/ring", n)
    assert len(play.rounds) == 2 * (n - 1)
    assert play.sent == pytest.approx(np.full(n, 2 * (n - 1) / n))
    finished = [float(each.has.min()) for each in play.rounds]  # from round n − 1 on a piece more in each round
    assert finished == pytest.approx([0.0] * (n - 2) + [(k + 1) / n for k in range(n)])


@pytest.mark.parametrize("n", [4, 8, 16])
def test_a_server_has_everything_on_its_link_a_tree_twice_the_buffer(n: int) -> None:
    server, tree = collective_rounds("reduce/flat+broadcast/flat", n), collective_rounds("all_reduce/tree", n)
    assert (server.received[0], server.sent[0]) == (n - 1, n - 1)
    assert tree.sent.max() <= 2.0
    assert len(tree.rounds) == 2 * log2(n)
    assert server.sent.sum() == tree.sent.sum() == 2 * (n - 1)  # no all-reduce that adds at ranks sends less


@pytest.mark.parametrize("name", ["all_gather/ring", "reduce/flat", "broadcast/flat+reduce/flat", "reduce/flat+all_gather/ring"])
def test_what_is_no_all_reduce_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="must be all_reduce|halves cut"):
        collective_rounds(name, 4)


def test_teach_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "rounds.png"
    shown = CliRunner().invoke(shardyard.main, ["teach", "all_reduce/ring", "all_reduce/tree", "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "1.50 S" in shown.output
    assert picture.stat().st_size > 10_000
    assert [row["rounds"] for row in shardyard.teach("all_reduce/ring", "all_reduce/tree", ranks=8)] == [14, 6]
