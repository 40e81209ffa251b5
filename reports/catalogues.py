"""What is in the catalogues, for `explain`: models, clusters, GPUs, profiles, failures, storage, each from its own file.

A word that is part of several names (H100, Gaudi, DGX, llama-3.1) is answered with those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from reports.formatting import digits, gigabytes, plural, size, span
from sim.pricing.shipped import describe_profile, load_profile, profile_for, profile_names
from strategies.models.model import load_model, model_names
from topologies.cluster_files import cluster_names, gpu_names, load_cluster, load_gpu
from topologies.costs import rates
from topologies.reading import folded, part_of
from topologies.reliability import DAY, load_reliability, reliability_names
from topologies.storage import load_storage, storage_names


class Catalogue(NamedTuple):
    """Names of one sort, and what is said of one of them: lines, without the indent."""

    names: Callable[[], list[str]]
    about: Callable[[str], Iterator[str]]


def entries(word: str, also_parts: bool = True) -> Iterator[str]:
    """What is known of things of that very name, capitals and hyphens aside; also_parts: then the names that it is part of."""
    parts = dict[str, list[str]]()
    for sort, catalogue in CATALOGUES.items():
        for name in catalogue.names():
            if folded(name) == folded(word):
                yield "\n".join((f"{name} ({sort})", *(f"  {line}" for line in catalogue.about(name) if line)))
            elif also_parts and part_of(word, name):
                parts.setdefault(sort, []).append(name)
    if parts:
        lines = (f"  {sort}s: {', '.join(names)}" for sort, names in parts.items())
        yield "\n".join((f"names with '{word.strip().lower()}'", *lines, "  see       shardyard explain NAME"))


def names() -> Iterator[str]:
    """All names of the catalogues."""
    for catalogue in CATALOGUES.values():
        yield from catalogue.names()


def _gpu(name: str) -> Iterator[str]:
    gpu = load_gpu(name)
    listed, usual = rates(gpu), [dtype for dtype in gpu.peak if dtype in ("bf16", "fp8")]
    peaks = ", ".join(f"{digits(gpu.peak[dtype] / 1e12)} TFLOP/s in {dtype}" for dtype in usual or gpu.peak)
    yield f"{gigabytes(gpu.memory)} GB at {digits(gpu.memory_bandwidth / 1e12)} TB/s; {peaks}"
    yield f"prices    profile {describe_profile(profile_for(name))}"
    yield f"costs     ${listed.usd:.2f} an hour, {listed.usd_source}" if listed.usd is not None else ""
    yield f"source    {gpu.source}" if gpu.source else ""
    yield f"see       --set cluster.node.gpu={name}"


def _cluster(name: str) -> Iterator[str]:
    cluster = load_cluster(name)
    node = cluster.node
    nics = f", {plural(node.nics, 'NIC')} of {size(node.nic)}/s" if node.nics else ""
    nvlink = f", NVLink {size(node.nvlink)}/s" if node.nvlink else ""
    yield f"nodes of {node.gpus} × {node.gpu.name} ({gigabytes(node.gpu.memory)} GB){nvlink}{nics}; fabric {cluster.fabric.kind}"
    yield f"source    {cluster.source}" if cluster.source else ""
    yield f"see       shardyard topology {name} --nodes 4"


def _model(name: str) -> Iterator[str]:
    model = load_model(name)[0]
    experts = f", {model.experts.experts} experts" if model.experts is not None else ""
    heads = f"{model.heads} heads, {model.kv_heads} of keys and values"
    yield (
        f"{digits(model.parameters / 1e9)} × 10⁹ parameters: {model.layers} layers, hidden {model.hidden:,}, {heads}{experts}, "
        f"vocabulary {model.vocabulary:,}, context {model.context:,}"
    )
    yield f"source    {model.source}" if model.source else ""
    yield f"see       --model {name}"


def _profile(name: str) -> Iterator[str]:
    profile = load_profile(name)
    yield f"prices of {', '.join(dict.fromkeys((profile.gpu, *profile.applies_to)))}: {describe_profile(profile)}"
    yield f"see       --profile {name}, docs/explanations/prices.md"


def _failures(name: str) -> Iterator[str]:
    failures = load_reliability(name, name)
    rate = failures.rate(1, failures.node_gpus or 8, slow=False)
    yield (
        f"failures that stop a job: one every {span(1 / rate)} of a node, {digits(1000 * DAY * rate)} in 1000 node-days"
        if rate
        else "nothing fails"
    )
    yield f"unknown   {', '.join(failures.unknown)}" if failures.unknown else ""
    yield f"source    {failures.source}" if failures.source else ""
    yield f"see       --set run.failures={name}"


def _storage(name: str) -> Iterator[str]:
    storage = load_storage(name, name)
    of = f" for every {storage.unit} nodes" if storage.unit else ""
    limits = {
        "write": storage.write,
        "read": storage.read,
        "write of a node": storage.node_write,
        "read of a node": storage.node_read,
    }
    yield f"storage that checkpoints go to{of}: {', '.join(f'{what} {size(rate)}/s' for what, rate in limits.items() if rate)}"
    yield f"source    {storage.source}" if storage.source else ""
    yield f"see       --set run.checkpoint.storage={name}"


CATALOGUES: Mapping[str, Catalogue] = {
    "GPU": Catalogue(gpu_names, _gpu),
    "cluster": Catalogue(cluster_names, _cluster),
    "model": Catalogue(model_names, _model),
    "profile": Catalogue(profile_names, _profile),
    "failure rate": Catalogue(reliability_names, _failures),
    "storage": Catalogue(storage_names, _storage),
}
