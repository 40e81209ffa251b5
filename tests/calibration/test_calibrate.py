"""`shardyard calibrate`: fits of samples with a known truth, measured tables in the simulation, journals, one real quick run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import shardyard
from calibration.calibrate import Request, from_logs
from calibration.fit.machine.kernels import WIDTH, fit_attention, fit_gemm, fit_memory, operator_tables
from calibration.fit.machine.links import fit_links
from calibration.fit.machine.tables import errors, leave_out, rows, tables
from calibration.launch.place import Place
from calibration.samples import Journal, Merged, Sample, merge, read_journal
from sim.analysis.collective_sweep import lone, sweep
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.pricing.block_costs import fused
from sim.pricing.kernel_curves import AttentionCurve, GemmCurve, Product, Rates, Tile, attention_seconds, gemm_clocks
from sim.pricing.measured_tables import CollectiveTable, Wrapping
from sim.pricing.prices import Prices, Profile
from sim.pricing.profile_file import described, signed, yaml_text
from sim.pricing.shipped import load_profile, profile_names
from sim.program import Collective, Kernel
from strategies.lowering.lower import lower
from topologies.cluster import load_cluster, load_gpu
from topologies.reading import UserError, build, parse_yaml

CORE = load_gpu("cpu-core")
LAUNCH = 3e-6
MODEL = {"name": "tiny", "layers": 2, "hidden": 128, "heads": 2, "vocabulary": 256, "context": 64}


def case(part: str, value: float, context: str = "alone", **sizes: Any) -> Merged:
    return Merged(part, sizes, context, value, value, 0.0, 1, 0)


# -- fits of samples whose truth is known -------------------------------------------------------------------------------------


def test_products_of_a_known_core_are_found_again() -> None:
    tile = Tile.model_construct(m=8, n=8, efficiency=1.0)
    truth = GemmCurve.model_construct(
        efficiency=0.7, depth=40.0, wave=0.0, split=0.0, memory=0.5, blend=4.0, fixed=2e-6, tiles=(tile,)
    )
    samples, rates = [], Rates(CORE.peak["fp32"], CORE.memory_bandwidth, 1)
    for m in (60, 256, 1024):
        for n in (100, 512, 2048):
            for k in (64, 384, 1024):
                traffic = WIDTH["fp32"] * (m * k + k * n), WIDTH["fp32"] * m * n
                price = gemm_clocks(truth, rates, Product((1, m, n, k), traffic))[1]
                samples.append(case("gemm", LAUNCH + price, batch=1, m=m, n=n, k=k, dtype="fp32", layout="forward"))
    _, points = fit_gemm(samples, CORE, "fp32", LAUNCH)
    out = [abs(point.error) for point in points if point.heldout]
    assert 8 < len(out) < 20
    assert np.median(out) < 0.02


def test_attention_of_a_known_core_is_found_again() -> None:
    truth = AttentionCurve.model_construct(
        efficiency=0.4, head_half=20.0, keys_half=50.0, keys_block=512, block=1, wave=0.0, fixed=0.0, backward=0.7
    )
    samples = []
    for batch, heads, length, dim in ((1, 4, 128, 64), (2, 8, 256, 32), (1, 8, 512, 64), (1, 12, 1024, 128), (2, 4, 384, 96)):
        shape = (batch, heads, heads, length, length, dim, 1)
        forward = attention_seconds(truth, CORE.peak["fp32"], 1, shape)
        for way, price in (("forward", forward), ("backward", forward * 2.5 / 0.7)):
            sizes = {"batch": batch, "heads": heads, "sequence": length, "head_dim": dim}
            samples.append(case("attention", LAUNCH + price, way=way, dtype="fp32", **sizes))
    curve, points = fit_attention(samples, CORE, "fp32", LAUNCH)
    assert curve.backward == pytest.approx(0.7, rel=0.02)
    assert max(abs(point.error) for point in points) < 0.03


def test_memory_rates_and_fixed_time_are_found_again() -> None:
    sizes = [2.0**power for power in range(14, 27)]
    rates = {"scale": 20e9, "softmax": 8e9}
    samples = [
        case("memory", LAUNCH + 1e-6 + size / rate, kind=kind, bytes=size) for kind, rate in rates.items() for size in sizes
    ]
    curve, points = fit_memory(samples, CORE, LAUNCH)
    assert curve.efficiency * CORE.memory_bandwidth == pytest.approx(20e9, rel=0.01)
    assert curve.reduction * CORE.memory_bandwidth == pytest.approx(8e9, rel=0.01)
    assert curve.fixed == pytest.approx(1e-6, rel=0.1)
    assert {point.series for point in points} == {"streams", "reductions"}


def test_operators_are_priced_as_measured_between_sizes() -> None:
    """A kernel that names an operator takes its table, without the launch that a synchronous host adds to every kernel."""
    sizes = [2**power for power in range(14, 27)]
    kinds = ("gelu", "copy", "scale", "softmax")
    truth = {size: 1e-6 + size / 7e9 for size in sizes}
    samples = [case("memory", LAUNCH + truth[size], kind=kind, bytes=float(size)) for kind in kinds for size in sizes]
    made, points = operator_tables(samples, LAUNCH)
    assert set(made) == {"gelu", "softmax"}
    assert made["gelu"].seconds(sizes[5]) == pytest.approx(1e-6 + sizes[5] / 7e9)
    assert made["gelu"].seconds(2 * sizes[-1]) == pytest.approx(2 * (1e-6 + sizes[-1] / 7e9), rel=1e-3)
    assert max(abs(point.error) for point in points if point.heldout) < 0.05
    curve = fit_memory(samples, CORE, LAUNCH)[0].model_copy(update={"operators": made})
    profile = load_profile("cpu-gloo").model_copy(update={"memory": curve, "launch": LAUNCH})
    prices = Prices(profile, CORE)
    named, plain = (Kernel("memory", "activation", "forward", 0.0, float(sizes[5]), "fp32", (), name) for name in ("gelu", ""))
    assert prices.seconds(named) == made["gelu"].seconds(sizes[5])
    assert prices.seconds(plain) != prices.seconds(named)


def collective(seconds: Any, operation: str = "all_reduce", ranks: int = 2) -> list[Merged]:
    """In a step twice as dear as alone; sizes of 1 KiB to 64 MiB."""
    sizes = [2.0**power for power in range(10, 27)]
    return [
        case("collective", factor * seconds(size), context, operation=operation, bytes=size, ranks=ranks, nodes=1)
        for size in sizes
        for context, factor in (("alone", 1.0), ("step", 2.0))
    ]


def test_table_carries_both_prices_and_follows_a_knee() -> None:
    def knee(size: float) -> float:
        return 1e-4 + size / 2e9 + max(0.0, size - 2**21) / 0.7e9

    (table,) = tables(collective(knee))
    assert (table.operation, table.algorithm, table.ranks) == ("all_reduce", "ring", 2)
    assert table.seconds(2**20) == pytest.approx(2 * knee(2**20))
    assert table.seconds(2**20, alone=True) == pytest.approx(knee(2**20))
    assert table.seconds(1.5 * 2**20) == pytest.approx(2 * knee(1.5 * 2**20), rel=0.1)
    assert table.seconds(16) == pytest.approx(2 * knee(2**10))
    assert table.seconds(2**28) == pytest.approx(4 * table.seconds(2**26))
    assert table.covers(2**26)
    assert not table.covers(2**27)


def test_error_on_left_out_sizes_is_that_of_interpolation() -> None:
    """A power of the size is a straight line in logarithms: nothing is lost. A line with a latency bends."""
    power, line = (collective(f) for f in (lambda size: 1e-9 * size**0.8, lambda size: 4e-4 + size / 2e9))
    assert errors(leave_out(power))["all"] == pytest.approx(0, abs=1e-9)
    assert 0.001 < errors(leave_out(line))["p90"] < 0.2
    assert not any(point.heldout for point in (leave_out(line)[0], leave_out(line)[-1]))


def test_prices_never_fall_as_sizes_grow() -> None:
    """A size that took less than a smaller one is noise: both get their mean (of the logarithms)."""
    noisy = {2.0**10: 1e-4, 2.0**11: 4e-4, 2.0**12: 1e-4}
    (table,) = tables(collective(lambda size: noisy.get(size, 1.0)))
    assert [entry.alone for entry in table.prices[:3]] == pytest.approx([1e-4, 2e-4, 2e-4])
    assert max(abs(point.error) for point in leave_out(collective(lambda size: noisy.get(size, 1.0)))[:3]) > 0.4


def test_formula_is_fitted_to_latency_and_bandwidth_of_gloo() -> None:
    """A ring of two sends S bytes: 1.8 GB/s alone is half as much in a step."""
    measured = rows(collective(lambda size: 0.4e-3 + size / 1.8e9))
    cluster = load_cluster("cpu-gloo")
    profile, points = fit_links(measured, load_profile("cpu-gloo"), cluster)
    assert profile.links["loopback"].efficiency * cluster.node.loopback == pytest.approx(0.9e9, rel=0.05)
    assert np.median([abs(point.error) for point in points if point.heldout]) < 0.02


def test_too_few_rows_make_no_fit() -> None:
    with pytest.raises(UserError, match="2 measured sizes"):
        fit_links(rows(collective(lambda size: 1e-3))[:2], load_profile("cpu-gloo"), load_cluster("cpu-gloo"))


# -- tables in the simulation ---------------------------------------------------------------------------------------------


def with_tables(**more: Any) -> Profile:
    made = tables([*collective(lambda size: 1e-3 + size / 1e9), *collective(lambda size: 5e-3 + size / 1e9, "broadcast")])
    return load_profile("cpu-gloo").model_copy(update={"tables": tuple(made), "processes": 2} | more)


@pytest.mark.parametrize(("operation", "size"), [("all_reduce", 2.0**16), ("all_reduce", 3e6), ("broadcast", 2.0**12)])
def test_simulation_pays_the_price_in_a_step(operation: str, size: float) -> None:
    cluster, profile = load_cluster("cpu-gloo"), with_tables()
    (options,) = sweep(cluster.topology(), Prices(profile, cluster.node.gpu), operation, 2, [size])
    table = next(one for one in profile.tables if one.operation == operation)
    assert [option.algorithm for option in options] == [table.algorithm]
    assert options[0].seconds == pytest.approx(table.seconds(size), rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "operation", "size", "note"),
    [
        (2, "all_reduce", 1e6, ""),
        (2, "all_gather", 1e6, "all_gather among 2 ranks on 1 node: not measured for profile 'cpu-gloo', extrapolated"),
        (4, "all_reduce", 1e6, "all_reduce among 4 ranks on 1 node: not measured"),
        (4, "all_reduce", 1e6, "4 processes on a node: profile cpu-gloo was measured with 2"),
        (2, "all_reduce", 2.0**28, "bytes are 4 times the largest that was measured"),
    ],
)
def test_prediction_says_when_it_leaves_what_was_measured(ranks: int, operation: str, size: float, note: str) -> None:
    cluster = load_cluster("cpu-gloo", overrides={"node.gpus": ranks})
    pricing, (work,) = lone(cluster.topology(), Prices(with_tables(), cluster.node.gpu), operation, ranks, [size])
    pricing.collective(work, 0)
    assert any(note in one for one in pricing.notes) if note else not pricing.notes


def test_another_algorithm_than_the_measured_is_priced_by_the_formula() -> None:
    cluster = load_cluster("cpu-gloo")
    bare, measured = (Prices(profile, cluster.node.gpu) for profile in (load_profile("cpu-gloo"), with_tables()))
    asked = [sweep(cluster.topology(), one, "all_reduce", 2, [1e6], "direct")[0][0].seconds for one in (bare, measured)]
    if not load_profile("cpu-gloo").tables:
        assert asked[0] == asked[1]


def test_wrapper_costs_its_fixed_time_and_its_copies() -> None:
    job = shardyard.read_job(model=MODEL, cluster="cpu-gloo", plan={"tp": 2, "precision": "fp32", "global_batch": 1})
    steps = []
    for wrapping in ({}, {"tp/all_reduce": Wrapping.model_construct(fixed=1e-3, rate=1e9)}):
        prices = Prices(with_tables(wrapping=wrapping), job.cluster.node.gpu)
        steps.append(run(lower(job.model, job.resolve()), job.cluster.topology(), prices))
    reduced = [
        (times, work)
        for cohort in steps[0].program.cohorts
        for op in cohort.ops
        if hasattr(op.work, "items")
        for times, work in op.work.items()
        if getattr(work, "operation", "") == "all_reduce"
    ]
    more = sum(times * (1e-3 + work.bytes / 1e9) for times, work in reduced)
    assert len(reduced) > 4
    assert summarise(steps[1]).step_seconds - summarise(steps[0]).step_seconds == pytest.approx(more, rel=1e-6)


def test_wrapper_of_a_gpu_is_host_time() -> None:
    """A GPU that is busy hides it; one that waits for the host does not: launch 1 s, wrapper 5 s, collective 2 s."""
    found = fused([(Collective("all_reduce", 1.0, "tp", "x"), 2.0)], 1.0, 1.0, [5.0])
    assert (found.busy, found.critical, found.host) == (2.0, 8.0, 6.0)


# -- files ------------------------------------------------------------------------------------------------------------------


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


def test_table_rows_must_ascend() -> None:
    row = {"step": "1 ms", "alone": "1 ms"}
    data = {"operation": "send", "algorithm": "direct", "ranks": 2, "prices": [row | {"bytes": "2 B"}, row | {"bytes": "1 B"}]}
    with pytest.raises(UserError, match="send of 2 ranks: bytes must ascend"):
        build(CollectiveTable, data, "p.yaml")


HEAD = {"device": "cpu", "ranks": 2, "machine": "m", "versions": "v", "quick": True, "cores": 2}


def sample(value: float, visit: int = 0, foreign: float = 0.0) -> Sample:
    case: dict[str, str | float] = {"batch": 1.0, "m": 1.0, "n": 1.0, "k": 1.0, "dtype": "fp32"}
    return Sample(part="gemm", case=case, value=value, round=visit, foreign=foreign)


def test_journal_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    first = Journal(path, HEAD)
    first.add(sample(1.0))
    with path.open("a") as file:
        file.write('{"part": "gem')
    second = Journal(path, HEAD)
    assert second.done() == {(0, sample(1.0).key)}
    second.add(sample(2.0, visit=1))
    assert [one.value for one in read_journal(path)[1]] == [1.0, 2.0]


def test_a_full_disk_keeps_what_is_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "s.jsonl", HEAD)
    journal.add(sample(1.0))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(UserError, match=r"s\.jsonl: cannot be written: No space left on device; 1 samples are kept"):
            journal.add(sample(2.0, visit=1))
    assert [one.value for one in Journal(tmp_path / "s.jsonl", HEAD).samples] == [1.0]


def test_a_journal_without_samples_is_begun_anew(tmp_path: Path) -> None:
    Journal(tmp_path / "s.jsonl", HEAD)
    Journal(tmp_path / "s.jsonl", HEAD | {"ranks": 4})
    assert read_journal(tmp_path / "s.jsonl")[0]["ranks"] == 4
    with pytest.raises(UserError, match="/dev/null: cannot be written: is no regular file"):
        Journal(Path("/dev/null"), HEAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"ranks": 2', '"ranks": 4'), "ranks=4 of its samples, but 2 now"),
        (lambda text: text.replace('"value":1.0', '"value":-1.0'), r"line 2: value=-1.0"),
        (lambda text: text.replace('{"part"', '"part"'), "line 2: not JSON"),
        (lambda text: "NCCL log\n" + text, "line 1: not JSON"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "line 1: format=9"),
    ],
)
def test_journal_of_another_machine_or_edited_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    Journal(path, HEAD).add(sample(1.0))
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=rf"s\.jsonl: {message}"):
        Journal(path, HEAD)


def test_disturbed_visits_count_only_where_there_are_no_others() -> None:
    calm = merge([sample(1.0), sample(9.0, 1, foreign=0.5), sample(1.2, 2)])
    assert (calm[0].value, calm[0].visits, calm[0].disturbed) == (pytest.approx(1.1), 3, 1)
    assert calm[0].spread == pytest.approx(0.2 / 1.1)
    assert merge([sample(9.0, foreign=0.5), sample(3.0, 1, foreign=0.2)])[0].value == 3.0


# -- the real thing ----------------------------------------------------------------------------------------------------------


def call(*arguments: str) -> Result:
    return CliRunner().invoke(shardyard.main, list(arguments))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Two processes over gloo, the smallest collectives, products and memory."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("calibrated") / "mine.yaml"
    parts = "gemm,memory,launch,collective,overlap,wrapping,footprint"
    return path, call("calibrate", "--quick", "--ranks", "2", "--largest", "2KiB", "--parts", parts, "--output", str(path))


def test_one_command_writes_profile_machine_and_plot(calibrated: tuple[Path, Result]) -> None:
    path, result = calibrated
    assert result.exit_code == 0, result.output
    assert sorted(one.name for one in path.parent.iterdir()) == [
        "mine.cluster.yaml",
        "mine.png",
        "mine.samples.jsonl",
        "mine.yaml",
    ]
    profile = load_profile(path)
    measured = {one.operation for one in profile.tables}
    assert measured == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "all_to_all",
        "gather",
        "scatter",
        "send",
        "barrier",
    }
    assert profile.provenance["links"].source == "measured by `shardyard calibrate`"
    assert profile.provenance["gemm"].heldout_error is not None
    assert set(profile.wrapping) >= {"dp/all_reduce", "dp/all_gather", "tp/all_reduce"}
    assert profile.overhead.context > 50e6
    assert profile.slowdown >= 1


def test_its_profile_and_machine_make_a_prediction(calibrated: tuple[Path, Result]) -> None:
    path, _ = calibrated
    job = path.with_name("job.yaml")
    plan = {"precision": "fp32", "global_batch": 2}
    job.write_text(
        json.dumps({"model": MODEL, "cluster": str(path.with_suffix(".cluster.yaml")), "profile": str(path), "plan": plan})
    )
    result = call("simulate", str(job), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["step_seconds"] > 0
    assert "mine" in answer["profile"]


def test_samples_can_be_fitted_again(calibrated: tuple[Path, Result], tmp_path: Path) -> None:
    path, _ = calibrated
    result = call("calibrate", "--from", str(path.with_suffix(".samples.jsonl")), "--output", str(tmp_path / "again.yaml"))
    assert result.exit_code == 0, result.output
    assert load_profile(tmp_path / "again.yaml").tables == load_profile(path).tables


def test_samples_of_a_cpu_make_no_profile_of_gpus(calibrated: tuple[Path, Result], tmp_path: Path) -> None:
    journal = calibrated[0].with_suffix(".samples.jsonl")
    with pytest.raises(UserError, match=r"mine\.samples\.jsonl: samples are of a CPU .* cluster dgx-h100 is another sort"):
        from_logs(Request(tmp_path / "p.yaml", cluster="dgx-h100"), [journal])


def test_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from calibration.measure import collectives
    from calibration.measure.bench import Bench
    from calibration.measure.grid import grid

    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        bench = Bench(Place(0, 1, 0, "cpu", (), lambda _: None), 0.01)
        alone = collectives.Group((0,), 1, None, 0)
        true = collectives.made
        probe = collectives.probes(grid("cpu", True), [alone], "cpu", 2**14)[0]
        assert probe.run(bench).value > 0
        monkeypatch.setattr(collectives, "made", lambda *a: (*true(*a)[:2], [2.0]))
        with pytest.raises(UserError, match="all_reduce of 1024 bytes among 1 ranks: the result is wrong"):
            probe.run(bench)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ([0.0], []),
        ([0.0, 0.0], [[(0, 1)]]),
        ([0.0] * 4, [[(0, 1), (2, 3)], [(0, 1, 2, 3)]]),
        ([0.0, 2.0], [[(0, 1)]]),
        ([0, 0, 2, 2], [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]]),
        ([0, 0, 2], [[(0, 1, 2)]]),
    ],
)
def test_groups_inside_nodes_across_and_all(hosts: Sequence[float], groups: list[list[tuple[int, ...]]]) -> None:
    pytest.importorskip("torch")
    from calibration.measure.collectives import layouts

    assert layouts(hosts) == groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "p.txt"], "--output p.txt: a profile is a .yaml file"),
        (["--output", "p.yaml", "--parts", "gem"], "unknown part 'gem'; did you mean 'gemm'"),
        (["--output", "p.yaml", "--largest", "4"], "--largest 4: needs a unit"),
        (["--output", "p.yaml", "--profile", "h20"], "did you mean 'h200'"),
        (["--output", "p.yaml", "--from", "x.log"], "--from: needs --cluster"),
        (["--output", "p.yaml", "--from", "x.log", "--cluster", "dgx-h100"], "x.log: cannot be read"),
        (["--output", "/dev/null/p.yaml"], "cannot be written there"),
        (["--output", "p.yaml", "--ranks", "1", "--parts", "collective"], "--parts collective: needs at least 2 ranks"),
        (["--output", "p.yaml", "--parts", "launch"], "--parts: gemm and memory are needed"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("calibrate", *arguments)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert message in result.output


def test_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = call("calibrate", "--output", str(tmp_path / "p.yaml"))
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "torch is not installed" in result.output


def test_ready_commands_for_a_cluster(tmp_path: Path) -> None:
    result = call("calibrate", "--output", "p.yaml", "--ranks", "8", "--nodes", "2", "--print-launch", "slurm")
    assert "#SBATCH --nodes=2" in result.output
    assert "--nproc-per-node=8" in result.output


def test_nccl_log_makes_a_profile(tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log"
    result = from_logs(Request(tmp_path / "p.yaml", cluster="dgx-h100"), [log])
    profile = load_profile(tmp_path / "p.yaml")
    assert profile.provenance["links"].source == log.name
    assert profile.provenance["gemm"] == load_profile("h100").provenance["gemm"]
    assert profile.links["nic"] != load_profile("h100").links["nic"]
    assert len(result.fitted.points["links"]) == 8
    assert not any("was measured on" in note for note in result.fitted.notes)


def test_a_log_of_another_machine_is_said(tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log"
    notes = from_logs(Request(tmp_path / "p.yaml", cluster="dgx-a100"), [log]).fitted.notes
    assert notes[0].endswith("was measured on NVIDIA H100 80GB HBM3 (h100-sxm), and cluster dgx-a100 has a100-sxm-80gb")
    with pytest.raises(UserError, match=r"--ranks 7: .* is of 16 ranks"):
        from_logs(Request(tmp_path / "p.yaml", cluster="dgx-h100", ranks=7), [log])


def test_compute_is_slowed_only_while_a_collective_works() -> None:
    """Of a collective that waits for others half of its time, compute beside it feels half."""
    profile = load_profile("cpu-gloo")
    job = shardyard.read_job("examples/demo.yaml", {"plan.microbatch": 4})

    def slowed(share: float) -> float:
        made = [
            table.model_copy(update={"prices": tuple(e.model_copy(update={"alone": share * e.step}) for e in table.prices)})
            for table in profile.tables
        ]
        prices = Prices(profile.model_copy(update={"tables": tuple(made)}), job.cluster.node.gpu)
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), prices)
        return summarise(timeline).breakdown["slowdown"] / summarise(timeline).step_seconds

    assert slowed(1.0) > 0.01
    assert slowed(2.0) == slowed(1.0)  # nothing works for longer than it takes
    half, whole = (1 - 1 / (1 + working * (profile.slowdown - 1)) for working in (0.5, 1.0))  # of the time, compute is lost
    assert slowed(0.5) / slowed(1.0) == pytest.approx(half / whole, rel=0.05)
    assert profile.tables[0].working(2.0**20) == pytest.approx(
        profile.tables[0].seconds(2.0**20, alone=True) / profile.tables[0].seconds(2.0**20)
    )


def test_a_log_that_does_not_name_its_collective_is_told_which(tmp_path: Path) -> None:
    known = (Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log").read_text().splitlines()
    nameless = tmp_path / "nccl.log"
    nameless.write_text("\n".join(line for line in known if "Collective test starting" not in line))
    ask = ("calibrate", "--output", str(tmp_path / "p.yaml"), "--cluster", "dgx-h100")
    assert "say which, as --collective all_reduce" in call(*ask, "--from", str(nameless)).output
    assert call(*ask, "--from", str(nameless), "--collective", "all_reduce").exit_code == 0
    assert "did you mean 'all_reduce'?" in call(*ask, "--from", str(nameless), "--collective", "al_reduce").output
    named = str(Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log")
    assert "is of all_reduce" in call(*ask, "--from", named, "--collective", "AllGather").output
    assert "--collective: says what logs are of" in call(*ask, "--collective", "all_reduce").output
