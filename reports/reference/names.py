"""The page of names that can be used: models, clusters, GPUs, and what is registered, each with its own sentence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from reports.commands.list import catalogues
from reports.formatting import digits, gigabytes
from reports.glossary import REGISTRIES
from reports.reference.markdown import code, plain, table
from strategies.models.model import load_model, model_names
from topologies.cluster_files import cluster_names, load_cluster


def names_page() -> str:
    """Catalogues and registries."""
    parts = ["# Names\n", "What `shardyard list` prints, with what each is.\n"]
    parts += ["## models\n", table(("model", "parameters", "layers", "hidden", "context"), _models())]
    parts += ["## clusters\n", table(("cluster", "GPUs of a node", "memory", "NICs", "source"), _clusters())]
    registered = {frozenset(registry): registry for registry in REGISTRIES}
    for sort, listed in catalogues().items():
        names = list(listed())
        if (registry := registered.get(frozenset(names))) is not None:
            parts += [f"## {sort}\n", table(("name", ""), ((code(name), _about(registry[name])) for name in names))]
        elif sort not in ("models", "clusters", "metrics"):
            parts += [f"## {sort}\n", ", ".join(code(name) for name in names) + "\n"]
    return "\n".join(parts)


def _models() -> Iterator[tuple[str, ...]]:
    for name in model_names():
        model = load_model(name)[0]
        yield code(name), f"{digits(model.parameters / 1e9)} × 10⁹", str(model.layers), f"{model.hidden:,}", f"{model.context:,}"


def _clusters() -> Iterator[tuple[str, ...]]:
    for name in cluster_names():
        node = load_cluster(name).node
        nics = f"{node.nics} × {digits(node.nic / 1e9)} GB/s" if node.nics else ""
        source = load_cluster(name).source
        yield code(name), f"{node.gpus} × {node.gpu.name}", f"{gigabytes(node.gpu.memory)} GB", nics, plain(source)


def _about(thing: Any) -> str:
    """The first sentence of its documentation, or of its file's."""
    thing = getattr(thing, "order", thing)
    own = inspect.getdoc(thing if inspect.isfunction(thing) or inspect.isclass(thing) else type(thing)) or ""
    text = own or inspect.getdoc(inspect.getmodule(thing)) or ""
    return plain(text.split("\n\n")[0])
