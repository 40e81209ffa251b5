"""Figure and tables of one collective against size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from reports.figures import figures
from reports.figures.busbw import busbw
from reports.tables.busbw import accuracy, comparison, size_of, table
from shardyard import main
from sim.analysis.collective_sweep import Point, Sweep

LOG = Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log"
PRICES = [
    [Point(1024.0, "ring", "ll", 1e-5), Point(1024.0, "ring", "simple", 2e-5)],
    [Point(2.0**30, "ring", "simple", 5e-3), Point(2.0**30, "ring", "ll", 3e-2)],
]
DATA = Sweep("all_reduce", "1 × toy, 8 ranks", 8, PRICES, [(1024.0, 8e-6), (2.0**30, 5e-3)], [1e-5, 5e-3])


def printed(renderable: object) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_table_names_choice_time_and_bandwidths() -> None:
    """1 GiB in 5 ms: algbw 215 GB/s, busbw 7/4 of it."""
    text = printed(table(DATA))
    row = next(line for line in text.splitlines() if "1 GiB" in line)
    assert row.split() == ["1", "GiB", "ring/simple", "5.00", "ms", "215", "376", "30.0", "ms", "5.00", "ms"]


def test_errors_are_summed_up() -> None:
    assert DATA.errors == pytest.approx([0.25, 0.0])
    assert accuracy(DATA) == "2 sizes: median error 12.5 %, 90th percentile 25.0 %, worst +25.0 % at 1 KiB"
    assert "+25.0 %" in printed(comparison(DATA))


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("data", [DATA, Sweep("broadcast", "toy", 2, PRICES)], ids=["measured", "prices"])
def test_figure_is_the_same_every_time(suffix: str, data: Sweep, tmp_path: Path) -> None:
    first, second = (busbw(data, tmp_path / f"{n}.{suffix}").read_bytes() for n in range(2))
    assert first == second
    assert "busbw" in figures


def test_sizes_as_nccl_tests_has_them() -> None:
    assert [size_of(value) for value in (512, 1024, 3 * 2**20, 2**30, 1.5e6)] == ["512 B", "1 KiB", "3 MiB", "1 GiB", "1.5 MB"]


def test_command_beside_a_log(tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    command = ["collective", "all_reduce", "--measured", str(LOG), "--sizes", "1KiB:64MiB:8", "--plot", str(plot)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "2 × dgx-h100, 16 ranks" in result.output
    assert "8 sizes: median error" in result.output
    assert "ignored lines: 1 (line 26" in result.output
    assert plot.stat().st_size > 10000


@pytest.mark.parametrize(
    ("where", "said"),
    [
        # two of one PCIe switch were measured; between four and eight there are other links, which were not
        ("pcie-l40s --ranks 2", "all_reduce among 2 ranks on 1 node within 5.1% (median, held out)"),
        ("pcie-l40s --ranks 2 --sizes 1MiB:1GiB", "among 2 ranks on 1 node within 5.1% (median, held out, of 512 B to 512 MiB)"),
        ("pcie-l40s --ranks 4", "all_reduce among 4 ranks on 1 node over pcie was not measured: its error is unknown"),
        ("pcie-l40s --ranks 8", "all_reduce among 8 ranks on 1 node over host, pcie was not measured: its error is unknown"),
        ("dgx-h100", "all_reduce among 8 ranks on 1 node within 3.6% (median, held out)"),
        ("dgx-h100 --nodes 2", "all_reduce among 16 ranks on 2 nodes within 3.2% (median, held out)"),
        ("dgx-h100 --ranks 8 --algorithm tree", "tree alone: its error is unknown"),
        ("aws-p5 --nodes 2", "all_reduce among 16 ranks on 2 nodes within 4.7% (median, held out)"),  # EFA
        ("aws-p5 --nodes 4", "over nic, nvlink was not measured: its error is unknown"),
        ("dgx-1v", "all_reduce among 8 ranks on 1 node over nvlink was not measured: its error is unknown"),
    ],
)
def test_error_is_that_of_what_was_measured_alike_or_unknown(where: str, said: str) -> None:
    result = CliRunner().invoke(main, ["collective", "all_reduce", "--sizes", "1MiB:1MiB", "--cluster", *where.split()])
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("prices: "))
    assert said in line


def test_an_error_is_not_said_of_sums_in_the_fabric(tmp_path: Path) -> None:
    file = tmp_path / "sharp.yaml"
    file.write_text("name: sharp\nbased_on: dgx-h100\nfabric: {sharp: 3}\n")
    result = CliRunner().invoke(
        main, ["collective", "all_reduce", "--cluster", str(file), "--nodes", "4", "--sizes", "1MiB:1MiB"]
    )
    assert "over nic, nvlink, switches that add was not measured: its error is unknown" in result.output
    assert "sums in the fabric's switches (SHARP) are priced by NCCL's own figures" in result.output


def test_command_as_json() -> None:
    result = CliRunner().invoke(main, ["collective", "all_gather", "--ranks", "4", "--sizes", "1MiB:4MiB", "--json"])
    data = json.loads(result.stdout)
    assert [row["bytes"] for row in data["rows"]] == [2.0**20, 2.0**21, 2.0**22]
    for row in data["rows"]:
        assert row["seconds"] == row["choices"][row["chosen"]]
        assert row["busbw"] == pytest.approx(0.75 * row["bytes"] / row["seconds"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_gathr"], "did you mean 'all_gather'"),
        (["all_reduce", "--sizes", "1:2"], "needs a unit"),
        (["all_reduce", "--sizes", "2KiB:1KiB"], "must be FROM:TO"),
        (["all_reduce", "--sizes", "1B:1GiB:1.01"], "more than 200 sizes"),
        (["all_reduce", "--algorithm", "ring/lll"], "unknown protocol 'lll'"),
        (["all_reduce", "--ranks", "9"], "at most the cluster's 8 GPUs"),
        (["all_gather", "--measured", str(LOG)], "is of all_reduce, not of all_gather"),
        (
            ["all_reduce", "--measured", str(LOG), "--nodes", "4", "--ranks", "32"],
            "has 16 ranks on 2 nodes, asked for are 32 on 4",
        ),
        (["all_reduce", "--measured", "nowhere.log"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["collective", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
