"""What parts of training say by themselves: collectives, parameter servers, schedules, models, settings of frameworks."""

from __future__ import annotations

import hashlib
import random
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from sim.analysis.collective_sweep import sweep, transport
from sim.pricing.prices import Prices
from sim.pricing.shipped import profile_for
from sim.program import Kernel
from strategies.frameworks.export import export
from strategies.frameworks.settings import frameworks
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from strategies.lowering.parameter_servers import parameter_servers
from strategies.memory_by_layer import memory_by_layer
from strategies.models.importers import Reader, model_type, read_hugging_face
from strategies.models.model import load_model
from strategies.predict import predict, prices_of
from strategies.read_job import read_job
from strategies.schedules import schedules
from strategies.schedules.table import cells
from strategies.schedules.unit_play import unit_play
from tests.results.jobs import CLUSTERS, UNUSUAL, random_question_job
from tests.results.questions import one_of, question
from topologies.cluster_files import load_cluster
from topologies.reading import UserError

MODELS = Path(__file__).parent.parent / "data" / "models"
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "scatter", "gather", "barrier"]
VALUES: list[Any] = [True, False, 2, 3, 0.25, "gelu", None, [0, 1, 1, 0], {"0": "a", "1": "b", "2": "c"}]  # of keys of files
ALGORITHMS = ["auto", "auto", "auto", "ring", "tree", "direct", "bruck", "hierarchical", "binomial", "chain", "auto/ll128"]


@question
def collective(draw: random.Random) -> Any:
    """Every choice of a collective by size."""
    cluster = load_cluster(draw.choice(["dgx-h100", "dgx-a100", "perlmutter", "pcie-l40s", *CLUSTERS]), draw.choice([1, 2, 3, 4]))
    operation, algorithm = draw.choice(OPERATIONS), draw.choice(ALGORITHMS)
    prices, topology = Prices(profile_for(cluster.node.gpu.name), cluster.node.gpu), cluster.topology()
    ranks = draw.choice([2, 3, 4, cluster.gpus, cluster.gpus, cluster.gpus // 2])
    points = sweep(topology, prices, operation, ranks, [1e3, 3e4, 1e6, 5e7, 2e9], algorithm)
    return {
        "points": [point for options in points for point in options],
        "transport": transport(topology, prices, operation, ranks),
    }


@question
def servers(draw: random.Random) -> Any:
    """Training with parameter servers."""
    fixed = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "data_parallel": "ddp", "schedule": "1f1b", "sequence_parallel": False}
    job = random_question_job(draw, plan=fixed | {"accumulation": draw.choice([1, 2])})
    staleness = draw.choice(["sync", "async", "0", "1", "3"])
    return parameter_servers(
        job, prices_of(job), draw.choice([1, 2, 3]), staleness, draw.choice([5, 30]), draw.choice([0.0, 0.2]), 1
    )


@question
def schedule(draw: random.Random) -> Any:
    """A schedule's cells, and what it holds and waits."""
    name, ranks = one_of(draw, schedules), draw.choice([2, 3, 4, 6])
    microbatches = draw.choice([ranks, 2 * ranks, 5, 8])
    table, *rest = cells(name, ranks, microbatches, None)
    play = unit_play(name, ranks, microbatches, None, draw.choice([1.0, 2.0]))
    held = [play.held(rank) for rank in range(ranks)]
    figures = (play.length, play.bubble, play.gaps, play.overhead)
    return {"cells": [" ".join(row) for row in table], "rest": str(rest), "held": held, "figures": figures, "passes": repr(play)}


@question
def file(name: str) -> Any:
    """A model as it is imported, and by kernel set what its parts cost and hold."""
    imported, ignored = load_model(str(MODELS / name))
    return {
        "fields": imported,
        "ignored": str(ignored),
        "parameters": imported.parameters,
        "flops": imported.forward_flops(2, 128, True),
        "kernels": {kernels: _costs(name, kernels) for kernels in ("megatron", "torch", "compiled", "apex")},
    }


def _least(name: str) -> tuple[dict[str, Any], Any]:
    """What the file of a model type must say, and the fields that are read."""
    said: dict[str, Any] = {"model_type": name, "hybrid_override_pattern": "M*-E"}
    while True:
        try:
            model, *_ = read_hugging_face(said, name)
        except UserError as error:
            missing = re.search("field '(.+)' is required", str(error))
            if missing is None:
                raise
            said[missing[1]] = 4 if "layer" in missing[1] else 8 if "head" in missing[1] else 512
        else:
            return said, model


@question
def defaults(name: str) -> Any:
    """A model type whose file says only what it must."""
    said, model = _least(name)
    return {"said": sorted(said), "fields": model}


@question
def keys(name: str) -> Any:
    """A model type whose file says one thing besides: fields that another value of a key changes, and a hash of what to."""
    said, model = _least(name)
    reader = Reader(said, name)
    model_type[name](reader)
    result: dict[str, Any] = {}
    for key in sorted(reader.read - {"model_type"}):
        changed, digest = list[str](), hashlib.sha256()
        for value in VALUES:
            try:
                other, ignored = read_hugging_face(said | {key: value}, name)
            except UserError as error:
                changed.append("refused")
                digest.update(str(error).encode())
                continue
            fields = {field: other.get(field) for field in other | model if other.get(field) != model.get(field)}
            changed.append(" ".join(sorted(fields)) or "-")
            digest.update(f"{sorted(fields.items())} {ignored}".encode())
        named = [f"{text} ×{len(list(same))}" for text, same in groupby(changed)]
        result[key] = f"{', '.join(named)} {digest.hexdigest()[:8]}"
    return result


def _costs(name: str, kernels: str) -> dict[str, list[float]]:
    """Sums over all parts; nothing where the kernel set has not what the model needs."""
    plan = {"kernels": kernels, "microbatch": 2, "sequence": 128, "recompute": "selective"}
    try:
        job = read_job(None, {}, model=str(MODELS / name), cluster="dgx-h100", plan=plan)
        costs = parts(job.model, job.resolve())
    except UserError:
        return {}
    every = [costs.embedding, *costs.layers, costs.head]
    held = [sum(getattr(part, each) for part in every) for each in ("parameters", "saved", "held", "backward_workspace")]
    result: dict[str, list[float]] = {"held": held}
    for direction in ("forward", "backward"):
        items = [item for part in every for item in getattr(part, direction) if isinstance(item, Kernel)]
        result[direction] = [len(items), sum(item.flops for item in items), sum(item.bytes for item in items)]
    return result


@question
def family(draw: random.Random) -> Any:
    """A step of a few layers of a model of some family, and what its layers hold."""
    config = MODELS / one_of(draw, (path.name for path in MODELS.glob("*.json")))
    plan = {"sequence": 256, "kernels": draw.choice(["megatron", "torch", "compiled", "apex"])}
    job = random_question_job(draw, {"model.layers": 4}, model=str(config), cluster="dgx-h100", nodes=1, plan=plan)
    summary = predict(job)
    return {"name": config.name, "summary": summary.to_dict(), "layers": memory_by_layer(job, summary)}


@question
def unusual(draw: random.Random) -> Any:
    """A step of a model of unusual layers, what they hold, and what a layer of each kind costs."""
    plan = {"sequence": draw.choice([256, 320]), "kernels": draw.choice(["megatron", "megatron", "torch", "compiled"])}
    job = random_question_job(draw, model=draw.choice(UNUSUAL), plan=plan)
    costs, summary = parts(job.model, job.resolve()), predict(job)
    items = [
        (item.label, item.flops, item.bytes)
        for part in (*costs.layers, costs.head)
        for item in part.backward
        if isinstance(item, Kernel)
    ]
    return {"job": repr(job), "summary": summary.to_dict(), "layers": memory_by_layer(job, summary), "backward": items}


@question
def program(draw: random.Random) -> Any:
    """What ranks do in a step."""
    job = random_question_job(draw)
    return {"job": repr(job), "program": lower(job.model, job.resolve())}


@question
def settings(draw: random.Random) -> Any:
    """A job as settings of a framework."""
    job = random_question_job(draw, nodes=draw.choice([1, 2]))
    name = one_of(draw, frameworks)
    return {"framework": name, **vars(export(name, job))}
