"""The search finds what brute force finds, on any engine, and loses nothing when it is interrupted."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reports.tables.search import verdict
from shardyard import read_job
from sim.pricing import shipped
from strategies.planner.search import search as module
from strategies.planner.search.answer import Answer, Progress, order, pareto
from strategies.planner.search.candidates import candidates
from strategies.planner.search.deadline import Deadline
from strategies.planner.search.evaluate import evaluate, version_of
from strategies.planner.search.executors import Engine, engine
from strategies.planner.search.objective import Limits, objective
from strategies.planner.search.results import Results
from strategies.planner.search.search import Search
from strategies.planner.search.site import Site, told_memory
from strategies.planner.search.space import default_space, load_space, parse_axis, read_space
from topologies.reading import UserError

MODEL = {"name": "small", "hidden": 1024, "layers": 8, "heads": 16, "vocabulary": 32000, "context": 2048}
SPACE = {
    "plan.tp": [1, 2, 4],
    "plan.pp": [1, 2, 4],
    "plan.microbatch": [1, 2],
    "plan.recompute": ["none", "full"],
    "plan.schedule": ["1f1b", {"plan.schedule": "interleaved", "plan.chunks": 2}, "zb-h1"],
    "plan.data_parallel": ["ddp", "zero1", "zero2", "zero3"],
}


def read(changes: dict[str, Any], **fields: Any) -> Any:
    return read_job(overrides=changes, model=MODEL, cluster="dgx-h100", nodes=2, plan={"global_batch": 32} | fields)


def here() -> Engine:
    return Engine(_Inline())


class _Inline(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def find(runs: Engine | None = None, space: dict[str, Any] = SPACE, goal: str = "step", **options: Any) -> Answer:
    return Search(read, read_space(space, "space"), objective(goal), runs or here(), **options).run()


def every(space: dict[str, Any]) -> list[dict[str, Any]]:
    """Every plan of the space that fits, simulated."""
    found = candidates(read({}), read_space(space, "space"))
    rows = [evaluate(found.job_of(plan)) for plan in range(len(found))]
    return sorted((row for row in rows if not row["error"] and row["fits"]), key=lambda row: row["step"])


def test_a_deadline_that_nothing_keeps_is_proven_without_simulating_everything() -> None:
    """Bounds rule plans out as they are tightened: one second less than the best plan needs leaves few to simulate."""
    best = find().rows[0]
    days = 1e12 / best["tokens_per_second"] / 86400
    late = find(tokens=1e12, limits=Limits(days=days * (1 - 1e-6)))
    assert late.best is None
    assert late.pruned["days"] == late.counts["bounded"] - late.pruned["memory"]
    assert late.counts["simulated"] < late.counts["bounded"] / 4
    assert f"{days:,.5g} days" in late.nearest["days"]
    assert find(tokens=1e12, limits=Limits(days=days * (1 + 1e-6))).best is not None


def test_brute_force_finds_the_same_winners() -> None:
    space = SPACE | {"plan.data_parallel": ["zero1", "zero3"], "plan.microbatch": [1], "plan.pp": [1, 4]}
    found, brute = find(space=space, top=3), every(space)
    assert found.counts["simulated"] < len(brute)
    assert found.proven >= 3
    assert [row["step"] for row in found.rows[:3]] == [row["step"] for row in brute[:3]]


OTHERS = {
    "plan.offload": [None, {"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}],
    "plan.overlap": [True, False],
    "plan.kernels": ["megatron", "torch"],
    "plan.deepspeed": [None, {"stage3_prefetch_bucket_size": 0}],
    "plan.schedule": ["1f1b", "1f1b-overlapped", "dualpipe-v", "chimera"],
    "plan.recompute": ["none", "full"],
    "plan.data_parallel": ["ddp", "ddp_fp16", "zero1", "zero3"],
    "plan.pp": [1, 2, 4],
    "plan.tp": [1, 4],
}


@pytest.mark.parametrize("seed", range(3))
def test_brute_force_finds_the_same_in_other_spaces(seed: int) -> None:
    """Some values of some fields, drawn at random."""
    draw = random.Random(seed)
    chosen = draw.sample(sorted(OTHERS), 5)
    space = {name: draw.sample(OTHERS[name], min(2, len(OTHERS[name]))) for name in chosen}
    found, brute = find(space=space, top=2), every(space)
    assert len(brute) >= 2
    assert [row["step"] for row in found.rows[:2]] == [row["step"] for row in brute[:2]]


def test_of_equals_the_plainest_plan_comes_first() -> None:
    sized = {"plan.overlap": True, "plan.offload": None, "nodes": 2}
    plain = {"value": 1.0, "fits": True, "memory": 2e9, "hash": "b", "changes": sized}
    others = [{"plan.overlap": False, "plan.offload": None}, {"plan.overlap": True, "plan.offload": {"optimizer": "cpu"}}]
    rows = [plain | {"memory": 1e9, "hash": "a", "changes": changes} for changes in others]
    assert min([*rows, plain], key=order) is plain


def test_the_front_is_that_of_brute_force() -> None:
    space = SPACE | {
        "plan.data_parallel": ["zero1", "zero3"],
        "plan.microbatch": [1],
        "plan.schedule": ["1f1b"],
        "plan.tp": [1, 2],
    }
    found = find(space=space, front=True)
    every_row = [row | {"pace": row["step"], "spend": row["step"]} for row in every(space)]
    assert found.front
    assert {(r["step"], r["memory"]) for r in pareto(found.rows)} == {(r["step"], r["memory"]) for r in pareto(every_row)}


def test_objectives_choose_between_clusters() -> None:
    """Most nodes are fastest; fewest cost least, as there is less to communicate."""
    space = {"nodes": [1, 2, 4], "plan.tp": [1, 2], "plan.data_parallel": ["zero1", "zero3"]}
    fast, cheap = find(space=space), find(space=space, goal="cost")
    assert fast.best is not None
    assert cheap.best is not None
    assert fast.best["gpus"] > cheap.best["gpus"]
    scale = cheap.best["scale"]
    dollars = cheap.best["step"] * scale.gpus / 3600 * scale.rates.usd * 1e9 / scale.tokens_per_step
    assert cheap.best["value"] == pytest.approx(dollars)


def test_constraints_say_how_many_plans_they_rule_out_and_what_would_fit() -> None:
    small = find(limits=Limits(memory=1e9))
    assert small.best is None
    assert small.pruned["memory"] == small.counts["allowed"]
    assert "GB of 1.0 GB" in small.nearest["memory"]
    assert find(limits=Limits(gpus=8)).nearest["gpus ≤ 8"] == "the smallest needs 16"
    assert find(limits=Limits(days=1e-9)).pruned["days"] > 0
    assert find(limits=Limits(power=1e3)).pruned["power ≤ 1.0 kW"] > 0


def test_a_space_without_plans_says_which_rules_are_broken() -> None:
    with pytest.raises(UserError, match=r"none of the 2 combinations .* is a plan: .*tp"):
        find(space={"plan.tp": [3, 5]})


@pytest.mark.parametrize("text", ["plan.tpp=1,2", "plan.tp=", "plan.tp=1,1", "colour=1", "plan.tp=x"])
def test_bad_axes_are_one_line(text: str) -> None:
    with pytest.raises(UserError):
        Search(read, read_space({}, "space").varied([parse_axis(text)]), objective("step"), here()).run()


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = str(tmp_path / "found.jsonl"), []

    def interrupted(job: Any) -> dict[str, Any]:
        asked.append(job.hash)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return evaluate(job)

    monkeypatch.setattr(module, "evaluate", interrupted)
    first = find(results=Results(file), top=4)
    assert first.interrupted == "interrupted"
    assert len(Path(file).read_text().splitlines()) == first.counts["simulated"] > 0
    second = find(results=Results(file), top=4)
    assert second.counts["known"] == first.counts["simulated"]
    assert [row["hash"] for row in second.rows] == [row["hash"] for row in find(top=4).rows]


@pytest.mark.parametrize("name", ["found.csv", "found.jsonl"])
def test_results_are_a_table_keyed_by_hash(tmp_path: Path, name: str) -> None:
    file = str(tmp_path / name)
    found = find(results=Results(file))
    again = find(results=Results(file))
    assert again.counts["simulated"] == 0
    assert again.best is not None
    assert found.best is not None
    assert {k: again.best[k] for k in ("hash", "step", "changes")} == {k: found.best[k] for k in ("hash", "step", "changes")}


@pytest.mark.parametrize("name", ["found.csv", "found.jsonl"])
def test_results_by_other_prices_or_code_are_set_aside(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / name)
    found = find(results=Results(file))
    monkeypatch.setattr(module, "version_of", lambda job: "another")
    again = find(results=Results(file))
    assert again.counts["set aside"] == again.counts["simulated"] == found.counts["simulated"]


def test_a_version_is_of_the_profiles_contents(tmp_path: Path) -> None:
    text = (Path(shipped.__file__).parent / "profiles/h100.yaml").read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    first = version_of(read({"profile": str(file)}))
    assert first == version_of(read({"profile": str(file)}))
    assert "launch: " in text
    file.write_text(re.sub(r"^launch: .*$", "launch: 99 us", text, flags=re.MULTILINE))
    assert version_of(read({"profile": str(file)})) != first


ROW = {
    "hash": "1" * 12,
    "version": "2" * 12,
    "changes": {"plan.tp": 2},
    "step": 1.0,
    "error": None,
    "fits": True,
    "gpus": 8,
    "tokens_per_second": 8.0,
    "tokens_per_second_per_gpu": 1.0,
    "mfu": 0.4,
    "memory": 1e9,
    "bubble": 0.0,
    "exposed": 0.1,
}


def test_a_row_that_was_cut_off_is_left_out_and_the_next_one_kept(tmp_path: Path) -> None:
    """Wherever it was cut: after its first character, or behind a brace that looks like its end."""
    file = tmp_path / "found.jsonl"
    row = ROW | {"changes": {"plan.offload": {"optimizer": "cpu"}}}
    whole, third = json.dumps(row), json.dumps(row | {"hash": "3" * 12})
    for cut in range(len(third)):
        file.write_text(f"{whole}\n{third[:cut]}")
        Results(str(file)).add(row | {"hash": "4" * 12})
        assert list(Results(str(file)).rows) == ["1" * 12, "4" * 12]
    file.write_text(f"{whole}\nand other words\n{third}\n")
    with pytest.raises(UserError, match=r"found\.jsonl: is not a table of results"):
        Results(str(file))


def test_a_full_disk_keeps_the_rows_that_are_there(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    file = tmp_path / "found.jsonl"
    results = Results(str(file))
    results.add(ROW)
    with full_disk(300), pytest.raises(UserError, match=r"found\.jsonl: cannot be written: File too large; 1 rows are kept"):
        results.add(ROW | {"hash": "2" * 12})
    Results(str(file)).add(ROW | {"hash": "4" * 12})
    assert list(Results(str(file)).rows) == ["1" * 12, "4" * 12]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_that_is_written_at_the_end_replaces_the_old_one_whole(
    suffix: str, tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    file = tmp_path / f"found{suffix}"
    results = Results(str(file))
    results.add(ROW)
    results.close()
    old = file.read_bytes()
    results.add(ROW | {"hash": "3" * 12})
    with full_disk(50), pytest.raises(UserError, match="cannot be written: File too large"):
        results.close()
    assert [file.read_bytes()] == [one.read_bytes() for one in tmp_path.iterdir()] == [old]
    results.close()
    assert list(Results(str(file)).rows) == ["1" * 12, "3" * 12]


def limited(runs: Engine | None = None, space: dict[str, Any] = SPACE, **options: Any) -> Search:
    """A search whose time the test ends."""
    return Search(read, read_space(space, "space"), objective("step"), runs or here(), seconds=1e6, **options)


def test_a_time_limit_says_how_far_it_got() -> None:
    search, whole = limited(top=4), find(top=4)

    def end(state: Progress) -> None:
        if state.simulated == 2:
            search.deadline = Deadline(0.0)

    search.tell = end
    found = search.run()
    assert found.interrupted == "the time limit of 1e+06 s"
    assert found.counts["simulated"] == len(found.rows) < whole.counts["simulated"]
    assert found.counts["open"] > 0
    assert found.proven < 4 <= whole.proven
    assert found.rows[: found.proven] == whole.rows[: found.proven]
    assert found.rows[0]["value"] * (1 - found.gap) <= whole.rows[0]["value"] <= found.rows[0]["value"]


def sleep(file: str, job: Any) -> Any:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_time_limit_ends_the_worker_that_simulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    monkeypatch.setattr(module, "evaluate", partial(sleep, str(file)))
    with engine(workers=1) as runs:
        search = limited(runs)

        def start(plan: tuple[int, int, Any]) -> None:
            task = runs.submit(module.evaluate, plan[2])
            while not file.exists():
                time.sleep(0.01)
            search.deadline = Deadline(0.1)
            return *plan[:2], task

        monkeypatch.setattr(search, "_start", lambda *plan: start(plan))
        found = search.run()
        assert found.best is None
        assert "none found yet (the time limit of" in verdict(found, read({}))
        assert found.counts["open"] == found.counts["bounded"] - found.pruned["memory"]
        assert runs.submit(abs, -1).result(60) == 1  # others go on
    worker = int(file.read_text())
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}")


def spin(*_: Any) -> Any:
    while True:
        pass


def test_a_time_limit_holds_while_bounds_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "of", spin)
    found = find(seconds=0.5)
    assert (found.best, found.interrupted) == (None, "the time limit of 0.5 s, before all bounds were known")
    assert "all of 432 combinations are open" in verdict(found, read({}))
    assert found.bound == 0.0


def test_a_time_limit_holds_while_a_bound_is_tightened(monkeypatch: pytest.MonkeyPatch) -> None:
    search, look = limited(), Search._look

    def late(self: Search, *entry: Any) -> Any:
        self.deadline = Deadline(0.1)
        return look(self, *entry)

    monkeypatch.setattr(Search, "_look", late)
    monkeypatch.setattr(Search, "_tighter", spin)
    found = search.run()
    assert (found.best, found.interrupted) == (None, "the time limit of 1e+06 s")
    assert "none found yet" in verdict(found, read({}))
    assert found.counts["open"] == found.counts["allowed"] - found.pruned["memory"] > 0


def test_threads_find_the_same_as_the_calling_thread() -> None:
    with ThreadPoolExecutor(2) as threads:
        found = find(Engine(threads), top=2)
    assert [row["hash"] for row in found.rows] == [row["hash"] for row in find(top=2).rows]


def die_once(file: str, value: int) -> int:
    """Ends its process the first time."""
    if not os.path.exists(file):
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value + 1


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    with engine(workers=1) as runs:
        assert runs.submit(die_once, str(tmp_path / "died"), 1).result(60) == 2


def test_dask_workers_find_the_same_even_when_one_dies(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
        ) as cluster,
        engine(dask=cluster.scheduler_address) as runs,
    ):
        assert runs.submit(die_once, str(tmp_path / "died"), 1).result(60) == 2
        found = find(runs, top=2)
    assert [row["hash"] for row in found.rows] == [row["hash"] for row in find(top=2).rows]


def test_ray_workers_find_the_same_even_when_one_dies(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with engine(ray="local") as runs:
        assert runs.submit(die_once, str(tmp_path / "died"), 1).result(60) == 2
        found = find(runs, top=2)
    assert [row["hash"] for row in found.rows] == [row["hash"] for row in find(top=2).rows]


def test_one_engine_at_a_time() -> None:
    with pytest.raises(UserError, match="only one of them"), engine(workers=2, dask="tcp://localhost:1"):
        pass


def test_the_usual_space_is_what_its_yaml_says(tmp_path: Path) -> None:
    space = default_space(read({}))
    file = tmp_path / "space.yaml"
    file.write_text(json.dumps({axis.name: list(axis.choices) for axis in space.axes}))
    assert load_space(str(file)) == space


def test_what_the_bounds_refuse_is_what_a_job_refuses() -> None:
    """A combination is dropped exactly when its job does not resolve, or when its schedule has nothing to do at pp=1."""
    space = read_space(SPACE | {"plan.tp": [1, 3, 32], "plan.microbatch": [1, 3], "plan.recompute": ["full"]}, "space")
    found = candidates(read({}), space)
    kept, dropped = [found.changes(plan) for plan in range(len(found))], 0
    for several in itertools.product(*(axis.choices for axis in space.axes)):
        changes = {field: value for choice in several for field, value in choice.items()}
        try:
            read(changes).resolve()
            twin = changes["plan.pp"] == 1 and changes["plan.schedule"] != "1f1b"
            dropped += twin
            assert (changes in kept) == (not twin)
        except UserError:
            assert changes not in kept
    assert found.same == dropped > 0


def test_memory_that_is_nearly_enough_is_told_with_as_many_places_as_show_it() -> None:
    assert told_memory(91.7e9, 85.5e9) == "91.7 GB of 85.5 GB"
    assert told_memory(85.5003e9, 85.5e9) == "85.5003 GB of 85.5000 GB"


def test_time_that_is_up_before_all_clusters_were_looked_at_proves_nothing() -> None:
    search, seen = limited(space={"nodes": [1, 2, 4], "plan.tp": [1, 2]}), list[str]()

    def end(state: Progress) -> None:
        seen.append(state.stage)
        if len(seen) == 2:
            search.deadline.at = 0.0

    search.tell = end
    found = search.run()
    assert found.interrupted == "the time limit of 1e+06 s, 1 of 3 clusters not looked at"
    assert found.bound == 0.0
    assert found.best is None


def test_a_gap_that_is_accepted_ends_the_search_before_the_best_is_proven() -> None:
    best, near = find(top=6), find(top=6, within=0.2)
    assert best.best is not None
    assert near.best is not None
    assert near.counts["simulated"] < best.counts["simulated"]
    assert near.gap <= 0.2
    assert near.best["step"] * (1 - 0.2) <= best.best["step"]


def test_every_other_simulation_is_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing was found, plans after a while are, every other time, the first of their degrees and data parallelism."""
    asked: list[tuple[Any, ...]] = []

    def none_fits(job: Any) -> dict[str, Any]:
        asked.append((job.plan.tp, job.plan.pp, job.plan.data_parallel))
        return evaluate(job) | {"fits": False}

    monkeypatch.setattr(module, "evaluate", none_fits)
    find(space=SPACE | {"plan.recompute": ["none"], "plan.tp": [1, 2]})
    first = module.PROBING + 1
    probes = range(first, first + 8, 2)
    assert all(asked[place] not in asked[:place] for place in probes)
