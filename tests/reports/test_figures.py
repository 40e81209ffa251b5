"""Figures: bars add up to what they stand for, and the same data give the same bytes."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from reports.figures import COLOURS, MEMORY, ORANGE, PALE, RED, _small, figures, time_unit
from reports.figures.breakdown import breakdown
from reports.figures.comparison import broken, comparison
from reports.figures.curve import Curve, curve
from reports.figures.film import FRAMES
from reports.figures.gantt import gantt
from reports.figures.growth import Growth, growth
from reports.figures.memory import memory
from reports.figures.memory_over_time import memory_over_time
from reports.figures.pareto import Front, Plan, pareto
from reports.figures.rounds import STEPS, rounds
from reports.figures.staleness import staleness
from reports.figures.steps import steps
from reports.figures.timeline_bars import chosen, lane_names, played_as, strips
from reports.figures.traffic import traffic
from reports.formatting import seconds
from reports.page.page import Report, _shows
from sim.analysis.breakdown import breakdowns
from sim.analysis.collective_rounds import collective_rounds
from sim.analysis.link_load import carried, link_loads, matrix
from sim.analysis.memory import ledger
from sim.analysis.summary import Summary, summarise
from sim.analysis.volume import volumes
from sim.timeline import Timeline
from strategies.lowering.parameter_servers import parameter_servers
from strategies.predict import prices_of, simulate
from strategies.read_job import read_job
from topologies.reading import UserError


def test_the_segments_of_a_breakdown_add_up_to_the_step(timeline: Timeline, summary: Summary) -> None:
    real = summarise(timeline)
    for runs, factor in (({"x": real}, 1e3), ({"a": real, "b": summary}, 1.0)):
        axes = breakdown.draw(runs).axes[0]
        for y, run in enumerate(runs.values()):
            bars = [bar for group in axes.containers for bar in group]
            widths = [bar.get_width() for bar in bars if round(bar.get_y() + bar.get_height() / 2) == y]
            assert sum(widths) == pytest.approx(run.step_seconds * factor, rel=1e-12)


def test_the_segments_of_a_breakdown_follow_each_other(summary: Summary) -> None:
    bars = [bar for group in breakdown.draw({"x": summary}).axes[0].containers for bar in group]
    for left, right in itertools.pairwise(bars):
        assert left.get_x() + left.get_width() == pytest.approx(right.get_x())


def test_memory_bars_add_up_to_the_peak_in_a_fixed_order(summary: Summary) -> None:
    axes = memory.draw(summary).axes[0]
    tops = [sum(group[stage].get_height() for group in axes.containers) for stage in range(2)]
    assert tops == pytest.approx([61.2, 40.0])
    assert axes.lines[0].get_ydata()[0] == 85.5
    colours = [to_hex(group[0].get_facecolor()).upper() for group in axes.containers]
    assert colours == [MEMORY[kind] for kind in ("parameter", "optimizer", "activation", "overhead")]


def test_memory_shows_the_rank_of_a_stage_that_holds_most(summary: Summary) -> None:
    less = replace(summary.memory[0], rank=1, peak=50e9)
    assert memory.draw(replace(summary, memory=(less, *summary.memory))).axes[0].texts[0].get_text() == "61.2"


def test_strips_hold_each_pass_once(timeline: Timeline) -> None:
    for lane in range(2):
        row = strips(timeline, lane)
        passes = [bar for bar in row.passes if bar.microbatch >= 0]
        assert sorted(bar.microbatch for bar in passes) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert sum("recompute" in bar.shares for bar in passes) == 4
        assert [set(bar.shares) for bar in row.passes if bar.microbatch < 0] == [{"optimizer"}]
        assert {"tp", "dp", "pp"} >= set(row.transfers)
        assert all(left.end <= right.start for left, right in zip(row.passes, row.passes[1:], strict=False))


def test_strips_lose_no_time(timeline: Timeline) -> None:
    """Without slowdown and waiting for the host, what is drawn is what the breakdown says; cut in spans, it is the same."""
    for lane, parts in enumerate(breakdowns(timeline)):
        for limit in (400, 5):
            row = strips(timeline, lane, limit)
            for name in ("forward", "backward", "recompute", "optimizer"):
                assert sum(bar.shares.get(name, 0.0) for bar in row.passes) == pytest.approx(parts[name], rel=1e-9)
        assert len(strips(timeline, lane, 5).passes) == 5
        assert all(sum(bar.shares.values()) <= bar.whole * (1 + 1e-9) for bar in strips(timeline, lane, 5).passes)


def test_gantt_numbers_the_passes_and_names_the_rows(timeline: Timeline, play: Callable[..., Timeline]) -> None:
    axes = gantt.draw(timeline).axes[0]
    assert {text.get_text() for text in axes.texts} == {"0", "1", "2", "3"}
    assert [text.get_text() for text in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    unfolded = play(fold=False, tp=2, pp=2, accumulation=4)
    assert lane_names(unfolded)[:2] == ["rank 0 (stage 0)", "rank 1 (stage 0)"]
    assert len(gantt.draw(play(tp=2, pp=2, accumulation=40)).axes[0].texts) < 2 * 40  # where there is room


def test_titles_say_which_step_is_shown() -> None:
    """GPUs alike in the figures over time of an expected step, whose breakdown is the expected one's; jitter is drawn once."""
    jobs = {
        ", all GPUs alike": {"variability": 0.02},
        "": {"variability": 0},
        ", one sample of jitter": {"variability": 0, "effects": ["all: jitter 0.05"]},
    }
    for ending, given in jobs.items():
        plan = {"data_parallel": "zero1", "global_batch": 16}
        timeline = simulate(read_job(model="gpt-1.7b", cluster="dgx-h100", nodes=1, plan=plan, **given))
        summary = summarise(timeline)
        assert gantt.figure(timeline).axes[0].get_title(loc="left").startswith(f"One step{ending}: ")
        assert memory_over_time.figure(timeline).axes[0].get_title(loc="left").endswith(f"holds over the step{ending}")
        assert steps.figure({"one": timeline}).axes[0].get_title(loc="left").endswith(f"s{ending}")
        assert played_as(timeline) == ending
        expected = "expected " if summary.variability else ""
        assert breakdown.figure({"one": summary}).axes[0].get_title(loc="left").startswith(f"Where the {expected}step goes: ")
        said = _shows(Report(timeline, summary, {}))
        assert said.startswith("This step of ") == bool(ending)
        assert (f"; the expected step takes {seconds(summary.step_seconds)}." in said) == bool(expected)


def test_a_few_lanes_stand_for_many(timeline: Timeline) -> None:
    many = replace(timeline, lanes=timeline.lanes * 32)
    assert chosen(many, 3) == [0, 32, 63]
    assert chosen(timeline, 3) == [0, 1]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_data_give_the_same_bytes(tmp_path: Path, timeline: Timeline, summary: Summary, suffix: str) -> None:
    for name, data in (("gantt", timeline), ("breakdown", {"x": summary}), ("memory", summary)):
        first, second = (figures[name](data, tmp_path / f"{n}.{suffix}").read_bytes() for n in range(2))
        assert first == second


def test_figures_are_found_by_name() -> None:
    assert {"gantt", "breakdown", "memory"} <= set(figures)
    with pytest.raises(UserError, match="did you mean 'gantt'"):
        figures["gant"]


def test_neighbouring_colours_differ() -> None:
    phases = [COLOURS[name] for name in ("forward", "backward", "recompute", "optimizer", "tp", "dp", "pp", "launch", "bubble")]
    assert len(set(phases)) == len(phases)


def test_a_comparison_shows_every_run_in_full(summary: Summary, too_big: Summary) -> None:
    left, right = comparison.draw({"fits": summary, "not": too_big}).axes[:2]
    for axes, totals in ((left, [1.23, 1.23]), (right, [61.2, 91.7])):
        for y, total in enumerate(totals):
            bars = [group[y] for group in axes.containers]
            assert sum(bar.get_width() for bar in bars) == pytest.approx(total, rel=1e-12)
    assert [text.get_text().strip() for text in left.texts] == ["1.23 s", "1.23 s, does not fit"]
    assert {group[1].get_alpha() for group in left.containers} == {0.35}


def test_memory_over_time_reaches_the_peak_of_the_fullest_gpu(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = max(ledger(timeline, lane).peak for lane in range(len(timeline.lanes)))
    for moments in (1500, 4):
        monkeypatch.setattr("reports.figures.memory_over_time.MOMENTS", moments)
        stacks = memory_over_time.draw(timeline).axes[0].collections
        top = max(path.vertices[:, 1].max() for stack in stacks for path in stack.get_paths())
        assert top == pytest.approx(peak / 1e9)


def test_traffic_between_ranks_is_what_they_send(timeline: Timeline) -> None:
    sent = matrix(timeline)
    by_volume = sum(
        lane.ranks * sum(size for size, _ in volume.values())
        for lane, volume in zip(timeline.lanes, volumes(timeline), strict=True)
    )
    assert sent.sum() == pytest.approx(by_volume)
    assert not sent.diagonal().any()
    assert traffic.draw(timeline).axes[0].images[0].get_array().sum() == pytest.approx(sent.sum() / 1e9)


def test_staleness_is_cumulated_to_all_gradients() -> None:
    job = read_job(model="gpt2-1.5b", cluster="dgx-a100", nodes=2, plan={"auto": False, "sequence": 1024})
    answers = {name: parameter_servers(job, prices_of(job), 8, name, 5, 0.2) for name in ("sync", "async")}
    right = staleness.draw(answers).axes[1]
    assert [line.get_ydata()[-1] for line in right.lines] == pytest.approx([100, 100])
    assert right.lines[0].get_ydata()[1] == pytest.approx(100)  # synchronous gradients miss nothing


def test_links_of_copies_to_the_host_are_loaded_too() -> None:
    """ZeRO-Offload: parameters come back to all GPUs in fp16, over PCIe and through the CPUs' memory."""
    example = Path(__file__).parents[2] / "examples/data_parallel/zero-offload.yaml"
    timeline = simulate(read_job(example))
    topology, each = timeline.op_costs.topology, carried(timeline)
    kinds = topology.kind(np.arange(topology.links))
    by_kind = {kind: each[kinds == number].sum() for number, kind in enumerate(topology.kinds)}
    alike = dict.fromkeys(topology.kinds, 0.0)
    for load in link_loads(timeline):
        alike[load.kind] += load.count * load.bytes
    assert by_kind == pytest.approx(alike)
    assert by_kind["pcie"] > 0


def test_white_stays_white_and_pictures_have_a_palette(tmp_path: Path, timeline: Timeline) -> None:
    with Image.open(gantt(timeline, tmp_path / "gantt.png")) as picture:
        assert picture.mode == "P"
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_steps_are_under_each_other_on_the_scale_of_the_longest(timeline: Timeline, play: Callable[..., Timeline]) -> None:
    longer = play(tp=2, pp=2, accumulation=16)
    panels = steps.figure({"short": timeline, "long": longer}).axes
    assert [ax.get_title(loc="left").split(":")[0] for ax in panels] == ["short", "long"]
    assert panels[0].get_xlim() == panels[1].get_xlim()
    assert panels[0].get_xlim()[1] == pytest.approx(longer.step * time_unit(longer.step)[0])
    ends = [line.get_xdata()[0] for ax in panels for line in ax.lines if line.get_color() == "black"]
    assert ends == pytest.approx([timeline.step * time_unit(longer.step)[0], longer.step * time_unit(longer.step)[0]])


def test_growth_has_a_panel_per_size_and_a_line_per_algorithm() -> None:
    lines = {"ring": [(2, 1e-5), (4, 2e-5), (8, 4e-5)], "tree": [(2, 1e-5), (4, 1.5e-5), (8, 2e-5)]}
    drawn = growth.figure(Growth("all_reduce", {f"{size} KiB": lines for size in (1, 4, 16, 64, 256, 1024)}))
    assert [ax.get_title(loc="left") for ax in drawn.axes] == ["1 KiB", "16 KiB", "64 KiB", "1024 KiB"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["ring", "tree"]  # the slowest first
    assert [label.get_text() for label in drawn.axes[0].get_xticklabels()] == ["2", "4", "8"]


def test_time_passes_in_a_film(tmp_path: Path, timeline: Timeline) -> None:
    """What is still to come is veiled: the first frame is the palest, the last one is the figure."""
    path = gantt(timeline, tmp_path / "step.gif")
    assert path.read_bytes() == gantt(timeline, tmp_path / "again.gif").read_bytes()
    with Image.open(path) as film:
        assert film.n_frames == FRAMES + 1
        shades = []
        for number in (0, FRAMES // 2, FRAMES):
            film.seek(number)
            shades.append(np.asarray(film.convert("L")).mean())
    assert shades == sorted(shades, reverse=True)
    assert shades[0] > shades[-1] + 10
    assert path.stat().st_size < 500_000


def test_rounds_are_a_film_whose_ranks_fill(tmp_path: Path) -> None:
    plays = [collective_rounds(name, 3) for name in ("all_reduce/ring", "all_reduce/tree")]
    with Image.open(rounds(plays, tmp_path / "rounds.gif")) as film:
        assert film.n_frames == len(plays[0].rounds) * (STEPS + 1)
        green = []
        for number in (0, film.n_frames - 1):
            film.seek(number)
            red, green_of, blue = np.asarray(film.convert("RGB"), int).transpose(2, 0, 1)
            green.append(int(((green_of > red + 60) & (green_of > blue)).sum()))
    assert green[1] > 5 * green[0]


def test_a_figure_without_time_does_not_move(tmp_path: Path, summary: Summary) -> None:
    with pytest.raises(UserError, match=r"memory.gif: this figure does not move: must end in .png or .svg"):
        memory(summary, tmp_path / "memory.gif")
    assert not list(tmp_path.iterdir())


def test_chunks_of_a_rank_are_told_apart_and_forward_from_backward() -> None:
    """ZB-V: two chunks on each rank, every microbatch forward, for inputs and for weights in each of them."""
    timeline = simulate(
        read_job(
            overrides=["model.layers=8"],
            model="llama-3.1-8b",
            cluster="dgx-h100",
            plan={"pp": 4, "schedule": "zb-v", "sequence": 4096, "accumulation": 4, "data_parallel": "zero1"},
        )
    )
    bars = [bar for bar in strips(timeline, 0).passes if bar.microbatch >= 0]
    assert Counter((bar.microbatch, bar.pale) for bar in bars) == {(each, pale): 3 for each in range(4) for pale in (False, True)}
    assert not any({"forward", "backward"} <= set(bar.shares) for bar in bars)
    labels = [text.get_text() for text in gantt.figure(timeline).legends[0].get_texts()]
    assert PALE in labels


def test_numbers_are_drawn_where_there_is_room(play: Callable[..., Timeline]) -> None:
    timeline = play(pp=2, accumulation=128)
    (left, right) = gantt.figure(timeline).axes
    shown = sum(last - first for first, last in (left.get_xlim(), right.get_xlim()))
    rows = [bar for lane in range(2) for bar in strips(timeline, lane).passes]
    widths = {round((bar.start + bar.end) / 2, 9): bar.end - bar.start for bar in rows}
    unit, _ = time_unit(timeline.step)
    for ax in (left, right):
        for text in ax.texts:
            width = next(w for x, w in widths.items() if x * unit == pytest.approx(text.get_position()[0], rel=1e-6))
            assert width * unit > 0.0066 * len(text.get_text()) * shown
    assert any(len(text.get_text()) == 1 for text in left.texts)


def test_of_many_local_steps_the_first_and_the_last_are_drawn(play: Callable[..., Timeline]) -> None:
    """And the same heights on both sides, though gradients are sent at the end only."""
    timeline = play(data_parallel="diloco", local_steps=50, accumulation=2)
    (left, right) = gantt.figure(timeline).axes
    assert "46 local steps alike" in right.get_title(loc="right")
    assert sorted({text.get_text() for text in left.texts}) == ["0", "1"]
    heights = [
        {round(float(path.vertices[:, 1].min()), 3) for each in ax.collections for path in each.get_paths()}
        for ax in (left, right)
    ]
    assert min(heights[0]) == min(heights[1])
    tops = [max(float(path.vertices[:, 1].max()) for path in ax.collections[0].get_paths()) for ax in (left, right)]
    assert tops[0] == tops[1]


@pytest.mark.parametrize("name", ["powersgd", "zero-plus-plus"])
def test_kernels_between_passes_that_are_no_updates_are_no_local_steps(name: str) -> None:
    """Compressed gradients, and parameters that are unpacked: more than 100 of them in a step that is drawn whole."""
    timeline = simulate(read_job(Path(__file__).parents[2] / f"examples/data_parallel/{name}.yaml"))
    assert len(gantt.figure(timeline).axes) == 1


def test_a_curve_shows_what_does_not_fit_in_its_legend() -> None:
    (ax,) = curve.figure(Curve("nodes", {"the job's plan": [(2.0, 1.0, False), (4.0, 1.0, True)]})).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["the job's plan", "out of memory"]


def test_a_curve_is_whole_and_its_ticks_are_what_was_asked() -> None:
    points = [(2.0, 11_000.0, True), (4.0, 10_900.0, True), (32.0, 10_000.0, False)]
    (ax,) = curve.figure(Curve("nodes", {"the job's plan": points})).axes
    assert ax.get_ylim() == (0, pytest.approx(1.12 * 11_000))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4", "32"]
    assert ax.get_xscale() == "log"


def test_long_names_of_runs_are_broken_at_commas() -> None:
    name = "plan.data_parallel=zero1,plan.tp=8,plan.pp=2,plan.sequence_parallel=true,plan.recompute=none"
    assert broken(name).split("\n") == [
        "plan.data_parallel=zero1,plan.tp=8,",
        "plan.pp=2,plan.sequence_parallel=true,",
        "plan.recompute=none",
    ]
    assert broken("ZeRO-3 (FSDP), microbatch 2") == "ZeRO-3 (FSDP), microbatch 2"


@pytest.mark.parametrize(("slowest", "scale"), [(3.0, "linear"), (40.0, "log")])
def test_days_far_apart_are_on_a_logarithmic_axis(slowest: float, scale: str) -> None:
    """And no name is over another."""
    plans = [Plan(f"a plan with a long name {days}", days, days, 90 - days, True) for days in (1.0, 1.2, 2.0, slowest)]
    drawn = pareto.figure(Front(plans, "10¹² tokens", "$", 80e9))
    (ax,) = drawn.axes
    assert ax.get_xscale() == scale
    drawn.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert boxes
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_plans_that_tie_do_not_seem_to_be_apart() -> None:
    """0.03 % of the days are less than a hundredth of the axis; dollars have no factor above theirs."""
    plans = [Plan("a", 78.874, 945_100, 65e9, True), Plan("b", 78.898, 946_300, 63e9, True)]
    drawn = pareto.figure(Front(plans, "10¹² tokens", "$", 80e9))
    drawn.canvas.draw()
    money, memory = drawn.axes
    low, high = memory.get_xlim()
    assert low < 78.874 < 78.898 < high
    assert 0.01 * (high - low) > 0.024
    assert "800 k" in [text.get_text() for text in money.get_yticklabels()]
    assert money.yaxis.get_offset_text().get_text() == ""


def test_a_colour_of_a_few_dots_stays_beside_one_that_is_near_it() -> None:
    """Ten red dots in a picture of 12,000 shades between six colours and white."""
    hues = (ORANGE, "#000000", "#0072B2", "#009E73", "#F0E442", "#56B4E9")
    dots = np.repeat(np.concatenate([np.linspace(255, _parts(hue), 2000).round().astype(np.uint8) for hue in hues]), 20, axis=0)
    dots[:10] = _parts(RED)
    picture = io.BytesIO()
    Image.fromarray(dots.reshape(400, -1, 3)).save(picture, format="PNG")
    with Image.open(io.BytesIO(_small(picture))) as small:
        assert to_hex(np.asarray(small.convert("RGB")).reshape(-1, 3)[5] / 255).upper() == RED


def _parts(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
