"""A job: model + plan + cluster (+ profile), everything that determines a prediction, read from one YAML file or from its parts.

model: llama-3.1-70b          # a preset, a path to config.json or YAML, or the fields themselves
cluster: dgx-h100             # from the catalogue, a path, or the fields themselves
nodes: 8                      # or groups of nodes that are not alike: [{count: 7}, {count: 1, missing: [nic 2]}]
plan: {tp: 8, pp: 2, global_batch: 128}  # or auto (the default); {global_batch: 128}, {auto: true, tp: 8}: the rest is found
profile: h100                 # optional: by default the one measured on the cluster's GPU
effects: ["gpu 37: speed 0.9"]  # optional: what makes GPUs, hosts or links differ from their price
run: {spares: 2, checkpoint: {interval: 30 min}}  # optional: what happens over days
variability: 0               # optional: standard deviation of ln(kernel seconds) among GPUs of one kind; 0: all alike
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.engine.effects import read_effects
from sim.engine.perturbation import Perturbation
from strategies.job import FIELDS, Auto, Job
from strategies.models.importers import is_hugging_face
from strategies.models.model import Model, load_model
from strategies.models.tracing.builders import is_module_source
from strategies.models.tracing.model import remarks_of, traced_model
from strategies.models.tracing.tracer import structure_of
from strategies.overrides import merge, parse_changes, parsed
from strategies.plan.defaults import with_batch, with_precision
from strategies.plan.plan import OPEN, Plan
from topologies.cluster import Cluster
from topologies.cluster_files import inline_cluster, load_cluster
from topologies.node import Node
from topologies.reading import UserError, build, folded, is_there, load_yaml, nearest, shown

if TYPE_CHECKING:
    from strategies.frameworks.settings import ReadSettings
    from strategies.resilience.settings import RunSettings

NAME = 200  # letters of a name
AUTO = "auto"


MODULE = ("module", "input", "name", "parallelize")  # what a job says of one


def read_job(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] | Mapping[str, Any] = (), **given: Any
) -> Job:
    """The job in a file (or its fields), with the fields `given` in place of the file's and `overrides` in place of both.

    overrides: ["plan.tp=4", …] as on the command line, or {"plan.tp": 4, …}. given: fields of a job, and files of frameworks'
    settings as from_deepspeed="ds_config.json", which go before the job's own plan, model and nodes, but not before `given`.
    A job that says nothing of its plan, or only fields of `strategies.plan.plan.OPEN`, or `plan: auto`, or `auto: true` among the
    plan's fields, has the best plan that a short search finds (`strategies.planner.auto_plan`), with the fields that are said;
    `plan={}` has the default of every field.

    Names of files inside the file are relative to it. Raises UserError.
    """
    job = stated_job(path, overrides, **given)
    if job.auto is None:
        return job
    from strategies.planner.auto_plan import with_auto_plan  # which simulates

    return with_auto_plan(job)


def stated_job(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] | Mapping[str, Any] = (), **given: Any
) -> Job:
    """As `read_job`, but no plan is found: what is not said of it has its default, and `Job.auto` says that it is to be found."""
    if not isinstance(overrides, Mapping):
        overrides = dict(map(parsed, [overrides] if isinstance(overrides, str) else overrides))
    job = _read(path, overrides, given)
    return replace(job, source=functools.partial(_again, path, overrides, given))


def _again(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    given: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> Job:
    """The same job with more overrides."""
    return _read(path, {**overrides, **changes}, given)


def _read(path: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any], given: Mapping[str, Any]) -> Job:
    """The job, with the default of what is not said of its plan."""
    given = dict(given)
    sample, parallelize = given.pop("input", None), given.pop("parallelize", None)
    asked = [_settings(field, given.pop(field)) for field in sorted(given) if field.startswith("from_")]
    fields, path = (path, None) if isinstance(path, Mapping) else ({}, path)
    folder, where = (Path(path).parent, str(path)) if path else (Path(), "job")
    data = _checked(load_yaml(Path(path)) if path else dict(fields), where)
    settings = [each for each in asked if each]
    for each in settings:
        data |= {field: value for field, value in (("model", each.model), ("nodes", each.nodes)) if value}
    for field in given:
        if field not in FIELDS:
            raise UserError(f"read_job: unknown field '{field}'{nearest(field, FIELDS)}")
    given = {field: value for field, value in given.items() if value not in (None, ())}
    replaced = bool(data.get("effects")) and "effects" in given
    data |= given
    from_file = set(data) - set(given)
    changes = parse_changes(overrides)
    for field in changes:
        if field not in FIELDS:
            raise UserError(f"--set {field}…: unknown field '{field}'{_meant(field)}")
    for field in ("model", "cluster"):
        if field not in data and field not in changes:
            raise UserError(f"{where}: field '{field}' is required: in a job file, or as --{field} (`shardyard list {field}s`)")
    base = {field: _near(data.get(field), folder if field in from_file else Path()) for field in FIELDS}
    for field in FIELDS:  # replaced as a whole by --set FIELD=VALUE
        if field in changes and not isinstance(changes[field], dict):
            base[field] = changes.pop(field)
    for field in ("name", "profile"):
        if not isinstance(base[field], str | None):
            raise UserError(f"{where}: {field}={shown(base[field])}: must be a text")
        if isinstance(base[field], str) and len(base[field]) > NAME:
            raise UserError(f"{where}: {field}={shown(base[field])}: must be at most {NAME} letters")
    model, ignored, derived = _model(base["model"], changes.get("model", {}), where, sample, parallelize)
    cluster = _cluster(base["cluster"], base["nodes"], changes.get("cluster", {}), where)
    wanted: dict[str, Any] = functools.reduce(merge, [each.plan for each in settings] + [changes.get("plan", {})], {})
    if settings and base["plan"] is None:
        base["plan"] = {}  # a framework's settings are a plan
    plan, at, auto = _plan(base["plan"], wanted, where, folder if "plan" in from_file else Path(), bool(settings))
    said = frozenset(plan.model_fields_set)
    if model.module is not None and "kernels" not in said:
        plan = plan.model_copy(update={"kernels": "torch"})
    if model.module is not None and cluster.gpus > plan.pp and structure_of(model.module).synchronises:
        plan = plan.model_copy(update={"sync_norm": True})  # as its SyncBatchNorms do
    plan, computing = with_precision(plan, cluster.gpu_kinds)
    of = "samples" if plan.sequence_of(model) == 1 else "sequences"
    plan, batch = with_batch(plan, cluster.gpus, bool(settings), of)
    name = base["name"] or (Path(path).stem if path else model.name)
    left_out = [f"effects: those of {where} are left out, for those that are given"] if replaced else []
    remarks = (*left_out, *batch, *computing, *derived, *(remark for each in settings for remark in _remarks(each, cluster)))
    effects = read_effects(base["effects"], f"{where}: effects")
    if effects:
        Perturbation(effects, cluster.topology())  # their targets exist
    run = _run(base["run"], changes.get("run"), cluster, f"{where}: run")
    variability = _variability(base["variability"], where)
    found = None if auto is None else Auto(plan, said, auto)
    return Job(str(name), model, plan, cluster, base["profile"], tuple(ignored), at, remarks, effects, run, variability, found)


def _meant(field: str) -> str:
    """Where a field of a plan, a cluster's node or a model belongs that was named without its section."""
    name = Plan.other_names.get(folded(field), field)
    for section, kind in (("plan", Plan), ("model", Model), ("cluster", Cluster), ("cluster.node", Node)):
        if name in kind.model_fields:
            return f"; here it is '{section}.{name}'"
    return nearest(field, FIELDS)


def _variability(value: Any, where: str) -> float | None:
    """Standard deviation of the logarithm of kernels' seconds among GPUs of one kind."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise UserError(f"{where}: variability={shown(value)}: must be a number from 0 (all GPUs alike) to 1")
    return float(value)


def _checked(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of a job."""
    if is_hugging_face(data):
        raise UserError(f"{where}: is a model and no job: give it as --model {where}, with --cluster")
    for field in data:
        if field not in FIELDS:
            raise UserError(f"{where}: unknown field '{field}'{nearest(field, FIELDS)}")
    return data


def _settings(field: str, file: str | Path | None) -> ReadSettings | None:
    """What a framework's file says; `field` is from_FRAMEWORK."""
    if not file:
        return None
    from strategies.frameworks.settings import frameworks  # whose rules few jobs need, and take milliseconds to make

    return frameworks[field.removeprefix("from_")].read(Path(file))


def _remarks(settings: ReadSettings, cluster: Cluster) -> Iterable[str]:
    if settings.ignored:
        yield f"{settings.where}: not used: {', '.join(settings.ignored)}"
    yield from (f"{settings.where}: {remark}" for remark in settings.remarks)
    if settings.gpus not in (None, cluster.gpus):
        yield f"{settings.where}: is for {settings.gpus} GPUs, and the cluster has {cluster.gpus}"


def _near(value: Any, folder: Path) -> Any:
    """A file named inside a file lies beside it."""
    if isinstance(value, Mapping) and "module" in value:
        return {**value, **{field: _near(value[field], folder) for field in ("module", "parallelize") if field in value}}
    if is_module_source(value):
        return str(folder / value) if is_there(folder / str(value).rpartition(":")[0]) else value
    if isinstance(value, str) and ("/" in value or "." in value) and is_there(folder / value):
        return str(folder / value)
    return value


def _model(
    value: Any, changes: Mapping[str, Any], where: str, sample: Any = None, parallelize: Any = None
) -> tuple[Model, list[str], list[str]]:
    """The model, keys of its file that were ignored, and what else the changes changed. sample: the input of a module;
    parallelize: what cuts it over tp ranks.
    """
    if value is None and changes:
        value, changes = changes, {}  # all of it by --set
    nested = isinstance(value, Mapping) and "module" in value
    source = value["module"] if nested else value
    by_class = sample is not None and isinstance(value, str) and value.endswith(".json")  # transformers' own
    if nested or by_class or not isinstance(value, str | Mapping | Path) or is_module_source(value):
        if changes or (nested and set(value) - set(MODULE)):
            raise UserError(f"{where}: model: a module says everything itself: only {', '.join(MODULE)} can be given")
        said = value if nested else {}
        given = sample if sample is not None else said.get("input")
        cutting = parallelize if parallelize is not None else said.get("parallelize")
        model = traced_model(source, given, said.get("name"), cutting)
        return model, [], remarks_of(model)
    if parallelize is not None:
        raise UserError(f"--parallelize {shown(parallelize)}: is for a module (--model FILE.py:NAME), not for {shown(value)}")
    if sample is not None:
        raise UserError(f"--input {shown(sample)}: is for a module (--model FILE.py:NAME), and the model is {shown(value)}")
    if isinstance(value, Mapping):
        stated, ignored, at, before = value, list[str](), f"{where}: model", None
    else:
        before, ignored = _loaded(str(value))
        stated, at = before.model_dump(exclude_unset=True), f"--set model of '{value}'"
    if before is not None and not changes:
        return before, ignored, []
    model = build(Model, merge(_following(stated, changes), changes), at)
    return model, ignored, [] if before is None else list(_derived(before, model, changes))


def _loaded(name: str) -> tuple[Model, list[str]]:
    """As `load_model`; a file of a framework's settings is said to be none of a model."""
    try:
        return load_model(name)
    except UserError as error:
        from strategies.frameworks.settings import frameworks

        keys = set[str]()
        with suppress(UserError):
            keys |= load_yaml(Path(name)).keys()
        framework = next((each for each in frameworks if frameworks[each].keys & keys), None)
        if framework is None:
            raise
        option = f"--from-{framework} {name}"
        raise UserError(f"{name}: is {framework}'s settings and no model: give it as {option}, beside --model") from error


def _following(stated: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields that a model states, without kv_heads where they are as many as the heads that change."""
    equal = stated.get("kv_heads") == stated.get("heads") and "heads" in changes and "kv_heads" not in changes
    return {field: value for field, value in stated.items() if not (equal and field == "kv_heads")}


def _derived(before: Model, model: Model, changes: Mapping[str, Any]) -> Iterable[str]:
    """What follows from changed sizes of a model, and what its file states and keeps nevertheless."""
    asked = [field for field in ("hidden", "heads") if field in changes and getattr(before, field) != getattr(model, field)]
    of = {"hidden": ("head_dim", "ffn"), "heads": ("kv_heads", "head_dim")}  # what has a default by them
    followers = [field for field in dict.fromkeys(field for size in asked for field in of[size]) if field not in changes]
    differ = [field for field in followers if getattr(model, field) != getattr(before, field)]
    moved = [f"{field}={getattr(model, field)} (was {getattr(before, field)})" for field in differ]
    kept = [f"{field}={getattr(model, field)}" for field in followers if field not in differ and field in before.model_fields_set]
    said = [f"with it {', '.join(moved)}"] * bool(moved) + [f"{', '.join(kept)} as {model.name} states"] * bool(kept)
    if said:
        yield f"{', '.join(f'model.{field}={getattr(model, field)}' for field in asked)}: {'; '.join(said)}"


def _cluster(value: Any, nodes: Any, changes: dict[str, Any], where: str) -> Cluster:
    nodes = changes.pop("nodes", nodes)  # --set cluster.nodes goes before the job's nodes
    if nodes is not None and not isinstance(nodes, list) and (type(nodes) is not int or nodes < 1):
        raise UserError(f"{where}: nodes={shown(nodes)}: must be a whole number of at least 1, or a list of groups of nodes")
    if isinstance(value, Mapping):
        changes = merge(value, changes)
        value = changes.pop("based_on", None)
        if value is None:
            if isinstance(changes.get("nodes"), list) and nodes is not None:
                raise UserError(f"{where}: nodes={shown(nodes)} contradicts the cluster's own list of nodes")
            return inline_cluster(changes if nodes is None else {**changes, "nodes": nodes}, f"{where}: cluster")
    return load_cluster(str(value), nodes, changes)


def _run(value: Any, changes: Mapping[str, Any] | None, cluster: Cluster, where: str) -> RunSettings | None:
    """The section about days; None when nothing is said."""
    if value is None and not changes:
        return None
    from strategies.resilience.settings import complete, read_run

    if changes and isinstance(value, Mapping | None):
        value = merge(complete(dict(value or {}), cluster), changes)
    return read_run(value, where)


def _plan(value: Any, changes: Mapping[str, Any], where: str, folder: Path, settings: bool) -> tuple[Plan, str, bool | None]:
    """The plan, where it was written, and whether it was asked for that it be found (None: it is not to be found); a schedule's
    file lies beside it. settings: whether some of it comes from a framework's settings, which are a plan.
    """
    if isinstance(value, str) and value != AUTO:
        data, at, folder = load_yaml(Path(value)), value, Path(value).parent
    elif value in (None, AUTO) or isinstance(value, Mapping):
        data, at = dict(value or {}) if value != AUTO else {}, f"{where}: plan" if where != "job" else "plan"
    else:
        raise UserError(f"{where}: plan={shown(value)}: expected fields, the name of a file, or auto")
    if "schedule" in data:
        data["schedule"] = _near(data["schedule"], folder)
    data = merge(data, changes)
    asked = data.pop(AUTO, True if value == AUTO else None)
    if not isinstance(asked, bool | None):
        raise UserError(f"{at}: auto={shown(asked)}: must be true or false: whether the fields that are not said are found")
    plan = build(Plan, data, at)
    open_ = not settings and (value is None or bool(value)) and plan.model_fields_set <= OPEN
    return plan, at, asked or (False if open_ and asked is None else None)
