"""`shardyard list`."""

from __future__ import annotations

from typing import Any

import click


@click.command("list")
@click.argument("sort", required=False)
def command(sort: str | None) -> None:
    """Names that can be used: models, clusters, gpus, wirings, fabrics, readers, profiles, schedules, algorithms, …"""
    catalogues = _catalogues()
    if sort is None:
        for name, names in catalogues.items():
            click.echo(f"{name}: {', '.join(names())}")
        return
    if sort not in catalogues:
        from topologies.reading import UserError, nearest

        raise UserError(f"unknown list '{sort}'{nearest(sort, catalogues)}")
    for name in catalogues[sort]():
        click.echo(name)


def _catalogues() -> dict[str, Any]:
    from calibration.profiles import profile_names
    from reports.metrics import metric_names
    from sim.collectives import algorithms
    from strategies.data_parallel import hooks
    from strategies.model import model_names
    from strategies.schedules import schedules
    from topologies.board import wirings
    from topologies.cluster import cluster_names, gpu_names
    from topologies.fabric import fabrics
    from topologies.readers import readers

    return {
        "models": model_names, "clusters": cluster_names, "gpus": gpu_names, "profiles": profile_names,
        "schedules": lambda: list(schedules), "data_parallel": lambda: list(hooks), "algorithms": lambda: list(algorithms),
        "metrics": metric_names, "wirings": lambda: list(wirings), "fabrics": lambda: list(fabrics),
        "readers": lambda: list(readers),
    }  # fmt: skip
