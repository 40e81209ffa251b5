"""Texts of the terminal, against sentences written by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from reports.formatting import bar, count, digits, percent
from reports.tables.comparison import brief, comparison
from reports.tables.step import one_screen, verdict
from sim.analysis.summary import Summary
from topologies.costs import Rates


def shown(what: RenderableType, **options: Any) -> str:
    out = StringIO()
    Console(file=out, width=100, **options).print(what)
    return out.getvalue()


def row(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_numbers_have_three_digits_and_no_exponent() -> None:
    assert [digits(x) for x in (41.23, 999.96, 1234.0, 0.0012345, 0.0)] == ["41.2", "1,000", "1,230", "0.00123", "0"]
    assert (count(213e3), count(6.5), percent(0.4123)) == ("213 k", "6.50", "41.2 %")
    assert (bar(0.5, 4), bar(0.28125, 4), bar(2, 4), bar(0, 4)) == ("██", "█▏", "████", "")


def test_long_lists_are_told_in_runs() -> None:
    assert brief([1] * 5 + [2] * 5) == "5 × 1, 5 × 2"
    assert brief([7, 8, 7]) == "[7, 8, 7]"


def test_verdict_when_it_fits(summary: Summary, job: dict[str, Any]) -> None:
    assert verdict(summary, job) == (
        "Llama-3.1 8B on 4 × DGX H100 (32 GPUs): 1.23 s per step, 213 k tokens/s, MFU 41.2 % of the bf16 peak, "
        "fits: 61.2 of 85.5 GB on stage 0"
    )


def test_verdict_when_it_does_not_fit_says_where_how_much_and_why(too_big: Summary, job: dict[str, Any]) -> None:
    assert verdict(too_big, job) == (
        "Llama-3.1 8B on 4 × DGX H100 (32 GPUs): out of memory on stage 0 by 6.20 GB: 91.7 of 85.5 GB, "
        "mostly activation 71.5 GB, optimizer 12.0 GB; "
        "1.23 s per step, 213 k tokens/s, MFU 41.2 % of the bf16 peak if it fitted"
    )


def test_verdict_of_one_gpu_without_a_plan(too_big: Summary) -> None:
    text = verdict(replace(too_big, gpus=1), {})
    assert "(1 GPU)" in text
    assert "fits with" not in text


def test_fixes_are_told(too_big: Summary, job: dict[str, Any]) -> None:
    assert "; fits with recompute=full, or pp=4;" in verdict(too_big, job | {"fixes": ["recompute=full", "pp=4"]})
    assert "; no small change of the plan makes it fit, nor do more nodes;" in verdict(too_big, job | {"fixes": []})


def test_one_screen_fits_on_a_screen_and_answers_first(too_big: Summary, job: dict[str, Any]) -> None:
    volume = dict.fromkeys(("tp", "cp", "ep", "dp", "pp"), too_big.volume["tp"])
    memory = tuple(replace(too_big.memory[stage != 3], stage=stage) for stage in range(8))
    busy = replace(too_big, notes=("a price is extrapolated",) * 9, volume=volume, memory=memory)
    text = shown(one_screen(busy, job | {"tokens": 15e12, "rates": Rates(2.0, "", 1000.0, "")}))
    lines = text.splitlines()
    assert len(lines) <= 39
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("Llama-3.1 8B on 4 × DGX H100 (32 GPUs): out of memory on stage 3")
    assert "… and 5 more notes" in text
    assert text.rstrip().endswith("`shardyard run`")


def test_one_screen_shows_seconds_share_memory_and_volume(summary: Summary, job: dict[str, Any]) -> None:
    text = shown(one_screen(summary, job))
    assert row(text, "forward").split()[:5] == ["forward", "100", "ms", "8.1", "%"]
    assert "cp exposed" not in text
    assert row(text, "0 ").split() == ["0", "4.00", "12.0", "41.0", "4.20", "61.2", "72", "%"]
    assert "0.800 Ψ" in text
    assert "GPU-hours per 10⁹ tokens  41.7" in text  # 32 GPUs · 1e9 / 213e3 s / 3600 s/h


def test_the_cost_of_a_training(summary: Summary, job: dict[str, Any]) -> None:
    text = shown(one_screen(summary, job | {"tokens": 15e12, "rates": Rates(2.5, "", 1000.0, "")}))
    assert "GPU-hours for 15 T tokens  626,000" in text  # 41.73 per 1e9
    assert "cost  $1.56 M at $2.50/h" in text
    assert "energy  ≤ 626 MWh" in text  # 1 kW for each GPU-hour
    assert "days  815" in text  # 15e12 / 213e3 s


def test_a_price_is_told_for_a_trillion_tokens_when_no_training_is_named(summary: Summary, job: dict[str, Any]) -> None:
    text = shown(one_screen(summary, job | {"rates": Rates(2.5, "", 1000.0, "")}))
    assert "cost of 10¹² tokens  $104 k at $2.50/h" in text  # 41.73 GPU-hours per 1e9
    assert "cost" not in shown(one_screen(summary, job | {"rates": Rates(None, "", 1000.0, "")}))


def test_colours_only_where_they_belong(too_big: Summary, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in shown(one_screen(too_big, job))
    colour = re.compile("\x1b\\[[0-9;]*3[0-9]m")
    assert colour.search(shown(one_screen(too_big, job), force_terminal=True, color_system="standard"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(shown(one_screen(too_big, job), force_terminal=True, color_system="standard"))


def test_a_name_is_not_markup(too_big: Summary, job: dict[str, Any]) -> None:
    odd = job | {"model": "[red]x[/]"}
    assert "[red]x[/]" in shown(one_screen(too_big, odd))
    assert "[b]" in shown(comparison([("[b]", too_big, odd), ("c", too_big, job)]))


def test_comparison_shows_only_inputs_that_differ_and_changes(summary: Summary, too_big: Summary, job: dict[str, Any]) -> None:
    parts = summary.breakdown
    slower = replace(summary, breakdown=parts | {"forward": 0.15, "backward": 0.05}, tokens_per_second_per_gpu=6000.0)
    faster = replace(too_big, tokens_per_second_per_gpu=9000.0)
    other = job | {"plan": job["plan"] | {"microbatch": 1}, "hash": "other"}
    text = shown(comparison([("base", summary, job), ("small", slower, other), ("big", faster, job)]))
    assert row(text, "microbatch").split() == ["microbatch", "2", "1", "2"]
    assert not re.search(r"^\s*(tp|hash|model) (?!exposed)", text, re.MULTILINE)
    assert row(text, "forward").split() == ["forward", "100", "ms", "150", "ms", "(+50.0", "ms)", "100", "ms"]
    assert row(text, "backward").split()[:7] == ["backward", "100", "ms", "50.0", "ms", "(−50.0", "ms)"]
    assert row(text, "fits").split() == ["fits", "yes", "yes", "over", "by", "6.20", "GB"]
    assert "★ base" in text  # the fastest that fits
    assert text.index("base") < text.index("small") < text.index("big")


def test_comparison_tells_notes_below_and_money_where_prices_differ(summary: Summary, job: dict[str, Any]) -> None:
    """32 GPUs, 262 k tokens in 1.23 s: 10¹² tokens take 41.7 k GPU-hours, $83.5 k at $2."""
    noted = replace(summary, notes=("rough",))
    dear, cheap = ({**job, "notes": [], "rates": Rates(price, "", 1.0, "")} for price in (4.0, 2.0))
    text = shown(comparison([("dear", summary, dear), ("cheap", noted, cheap)]))
    assert row(text, "cost of").split()[-4:] == ["$167", "k", "$83.5", "k"]
    assert "note on cheap: rough" in text
    assert "[]" not in text
    assert "cost of" not in shown(comparison([("one", summary, dear), ("other", summary, dear)]))


def test_comparison_has_the_fields_of_a_variant_under_each_other_and_names_the_fewer_runs(
    summary: Summary, job: dict[str, Any]
) -> None:
    noted = replace(summary, notes=("rough",))
    long = "plan.tp=2,plan.data_parallel=zero1,cluster.node.nic=25 GB/s"
    runs = [("base", noted, job), (long, noted, job), ("last", summary, job)]
    text = shown(comparison(runs))
    assert max(map(len, text.splitlines())) < 130
    assert [line.strip() for line in text.splitlines() if "zero1," in line] == ["plan.data_parallel=zero1,"]
    assert "note on all but last: rough" in text
    assert f"note on {long}: rough" in shown(comparison([runs[2], runs[1]]))


def test_comparison_tells_ties_between_runs_of_one_profile(summary: Summary, job: dict[str, Any]) -> None:
    near, far = (replace(summary, tokens_per_second_per_gpu=summary.tokens_per_second_per_gpu * part) for part in (0.95, 0.85))
    foreign = replace(near, profile="other")
    other = job | {"model": "another"}
    text = shown(comparison([("a", summary, job), ("b", near, job), ("c", far, job), ("d", foreign, job), ("e", near, other)]))
    assert "≈ e" not in text
    assert "★ a" in text
    assert "≈ b" in text
    assert "≈ c" not in text
    assert "≈ d" not in text


def test_comparison_when_nothing_fits(too_big: Summary, job: dict[str, Any]) -> None:
    assert "no run fits" in shown(comparison([("a", too_big, job)]))
    with pytest.raises(ValueError, match="at least one run"):
        comparison([])
