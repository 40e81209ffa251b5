"""Tables of plans and scaling as figures and sheets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from reports.figures import GREY, LIGHT, figures
from reports.figures.efficiency import Scaling, Size, efficiency
from reports.figures.heatmap import Cell, Maps, heatmap
from reports.figures.pareto import pareto
from reports.page.simulated_plans import Plans, front, panels, section, sheet
from topologies.costs import Rates
from topologies.reading import UserError

RATES = Rates(2.0, "as given", 700.0, "as given")
JOB = {"tp": 1, "pp": 1, "data_parallel": "zero1", "microbatch": 1}


def row(tp: int, rate: float | None, memory: float = 40e9, fits: bool = True, **more: Any) -> dict[str, Any]:
    """A plan on 8 GPUs, `rate` tokens/s/GPU; None: refused."""
    changes = {"plan.tp": tp} | {f"plan.{name}": value for name, value in more.items()}
    if rate is None:
        return {"hash": "", "step": None, "error": "tp=16 does not divide 8 heads", "changes": changes}
    return {
        "hash": f"{tp}{more}",
        "step": 8e4 / rate,
        "gpus": 8,
        "tokens_per_second": 8 * rate,
        "tokens_per_second_per_gpu": rate,
        "mfu": rate / 2e4,
        "memory": memory,
        "fits": fits,
        "bubble": 0.0,
        "exposed": 0.1,
        "events": 1,
        "error": None,
        "changes": changes,
    }


ROWS = [
    row(1, 1000, 70e9),
    row(2, 900, 50e9),
    row(2, 950, 60e9, microbatch=2),
    row(4, 800, 55e9),
    row(8, 1200, 90e9, fits=False),
    row(16, None),
    row(1, 700, 30e9, pp=2, data_parallel="ddp"),
]


def plans(rows: list[dict[str, Any]]) -> Plans:
    return Plans(rows, JOB, 1e9, RATES, 80e9)


def test_a_map_has_the_best_plan_of_each_cell_per_setting() -> None:
    maps = panels(plans(ROWS))
    assert list(maps) == ["zero1", "ddp"]
    assert maps["zero1"] == {
        (1, 1): Cell(1000),
        (2, 1): Cell(950),
        (4, 1): Cell(800),
        (8, 1): Cell(1200, False),
        (16, 1): Cell(None, False),
    }
    assert maps["ddp"] == {(1, 2): Cell(700)}
    assert panels(plans([row(1, 1.0, microbatch=m) for m in (1, 2)])) == {}  # neither tp nor pp varies


def test_a_map_stars_the_best_that_fits_and_tells_why_others_are_not() -> None:
    axes = heatmap.draw(Maps(panels(plans(ROWS)))).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if "★" in text] == ["★ 1.00 k"]  # 1.2 k does not fit
    looks = {(patch.get_x() + 0.5, patch.get_y() + 0.5): patch for patch in axes.patches}
    assert looks[0, 3].get_hatch()
    assert to_hex(looks[0, 3].get_facecolor()).upper() == LIGHT
    assert to_hex(looks[0, 4].get_facecolor()).upper() == GREY
    assert to_hex(looks[1, 0].get_facecolor()) == "#ffffff"  # pp 2 with zero1 was not simulated


def test_the_front_is_what_nothing_beats() -> None:
    points = front(plans(ROWS)).plans
    assert [point.front for point in points] == [True, True, True, False, True]  # tp 4: slower and more memory than tp 2
    fastest = points[0]
    assert fastest.days == pytest.approx(1e9 / 8000 / 86400)
    assert fastest.spent == pytest.approx(fastest.days * 24 * 8 * 2.0)
    drawn = pareto.draw(front(plans(ROWS)))
    assert len(drawn.axes) == 1  # eight GPUs each: cost is time
    names = {text.get_text() for text in drawn.axes[0].texts}
    assert names <= {point.name for point in points if point.front}
    assert fastest.name in names


def test_the_sheet_has_numbers_and_reasons() -> None:
    table = sheet(plans(ROWS))
    assert list(table.columns[:2]) == ["tp", "microbatch"]
    assert "$ for 10⁹ tokens" in table.columns
    assert [row[0] for row in table.rows] == [1, 2, 2, 4, 1, 8, 16]
    assert [row[-1] for row in table.rows] == [*["fits"] * 5, "out of memory", "tp=16 does not divide 8 heads"]
    assert table.rows[6][table.columns.index("step (s)")] is None


def test_other_gpus_are_not_paid_at_the_price_of_these() -> None:
    mixed = [row(1, 1000), row(1, 900) | {"changes": {"cluster": "dgx-a100"}}]
    assert plans(mixed).money == "GPU-hours"
    assert plans(ROWS).money == "$"


def test_a_table_without_plans_is_one_line() -> None:
    with pytest.raises(UserError, match="the table of plans is empty"):
        section(plans([]), "Plans of x.jsonl")


WEAK, STRONG = [Size(8, 100), Size(16, 98), Size(32, 95)], [Size(8, 100), Size(16, 99, False), Size(32, 60)]
SCALING = Scaling({"weak": WEAK, "strong": STRONG}, {"node": 8, "leaf": 256})


def test_scaling_is_told_in_percent_of_the_fewest_gpus() -> None:
    axes = efficiency.draw(SCALING).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["weak"].get_ydata()) == [100, 98, 95]
    assert list(lines["strong"].get_ydata()) == [100, 99, 60]
    assert {text.get_text().strip() for text in axes.texts} == {"98 %", "95 %", "99 %", "60 %", "within a node"}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_plans_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name, data in (("heatmap", Maps(panels(plans(ROWS)))), ("pareto", front(plans(ROWS))), ("efficiency", SCALING)):
        first, second = (figures[name](data, tmp_path / f"{n}.{suffix}").read_bytes() for n in range(2))
        assert first == second
