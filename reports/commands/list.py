"""`shardyard list`."""

from __future__ import annotations

import json
from typing import Any

import click

from reports.commands._common import AS_JSON
from reports.terminal import echo


@click.command("list", epilog="Example: shardyard list clusters")
@click.argument("sort", required=False)
@AS_JSON
def command(sort: str | None, as_json: bool) -> None:
    """Names that can be used: models, clusters, gpus, wirings, fabrics, readers, profiles, schedules, algorithms, …"""
    known = catalogues()
    if sort is not None and sort not in known:
        from topologies.reading import UserError, nearest

        raise UserError(f"unknown list '{sort}'{nearest(sort, known)}")
    listed = {name: list(names()) for name, names in known.items() if sort in (None, name)}
    if as_json:
        echo(json.dumps(listed, indent=2))
    elif sort is None:
        echo("\n".join(f"{name}: {', '.join(names)}" for name, names in listed.items()))
    else:
        echo("\n".join(listed[sort]))


def catalogues() -> dict[str, Any]:
    """By sort, a function that gives the names."""
    from reports.metrics import metric_names
    from sim.collectives import algorithms
    from sim.engine.effects import effects
    from sim.pricing.shipped import profile_names
    from strategies.data_parallel import hooks
    from strategies.frameworks import kernel_sets
    from strategies.models.model import model_names
    from strategies.optimizers import optimizers
    from strategies.resilience.checkpointing import policies
    from strategies.resilience.intervals import intervals
    from strategies.resilience.recovery import recoveries
    from strategies.schedules import schedules
    from topologies.board import wirings
    from topologies.cluster_files import cluster_names, gpu_names
    from topologies.fabric import fabrics
    from topologies.readers import readers
    from topologies.reliability import reliability_names
    from topologies.storage import storage_names

    return {
        "models": model_names,
        "clusters": cluster_names,
        "gpus": gpu_names,
        "profiles": profile_names,
        "schedules": lambda: list(schedules),
        "data_parallel": lambda: list(hooks),
        "kernels": lambda: list(kernel_sets),
        "optimizers": lambda: list(optimizers),
        "algorithms": lambda: list(algorithms),
        "effects": lambda: list(effects),
        "metrics": metric_names,
        "wirings": lambda: list(wirings),
        "fabrics": lambda: list(fabrics),
        "readers": lambda: list(readers),
        "failures": reliability_names,
        "storage": storage_names,
        "checkpoint_policies": lambda: list(policies),
        "checkpoint_intervals": lambda: list(intervals),
        "recoveries": lambda: list(recoveries),
    }
