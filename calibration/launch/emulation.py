"""An emulated cluster on one Linux machine: network namespaces as nodes, joined by links of a known bandwidth.

Every node has one veth cable to a bridge, which is in a namespace of its own; `tc tbf` (tc-tbf(8)) limits both ends of it, so
that a link carries the bandwidth in each direction at once. Nothing is made in the machine's own network, and all of it
goes with the namespaces: `cluster` deletes them however it is left, and begins with those that a killed run left behind.

What such a cluster costs is not fitted: prices inside a node are the profile's, a link between nodes carries what is left of its
bandwidth for data, and a hop takes the time that gloo takes for one over the loopback device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from calibration.launch.launcher import under_launcher
from calibration.launch.local import DEVICE
from calibration.launch.place import uninterrupted
from sim.engine.effects import read_effects
from sim.pricing.prices import Profile
from strategies.job import Job
from topologies.cluster import UnequalCluster
from topologies.documents.units import BytesPerSecond
from topologies.node_group import NodeGroup
from topologies.reading import Config, UserError, build

if TYPE_CHECKING:
    from calibration.launch.place import Place

NAME = "shardyard"  # namespaces: NAME-<process>-<node or switch>
MTU, ETHERNET, HEADERS = 1500, 14, 52  # bytes of a packet, of its frame's header, and of IPv4's and TCP's with timestamps
CREDIT = 2e-3  # seconds at full speed that a limit lets through at once: below a timer's tick or two it would not be reached
LEAST_CREDIT = 32 * 1024  # bytes
QUEUE = 200e-3  # seconds of full speed that wait at a limit before packets are dropped
PROBE = 8 * 2**20  # bytes, of the all-reduce that tells what links carry
# gloo's reduce-scatter is an all-reduce inside (counted at its sockets). Two ranks share one connection in both directions: in an
# all-gather the one that comes last sends the first half of its part at once, and what tells the other that it may send waits
# behind that, so that three halves follow one another (timed on bare links: 1.5; three ranks and more: 1.1 to 1.3, left out)
WIRE = {"reduce_scatter": 2.0, "all_gather/2": 1.5}


class Emulation(Config):
    """`nodes` of `ranks` processes each; bandwidth per direction. slow: that of the last node's link, if it differs."""

    nodes: int = Field(ge=2, le=64)
    bandwidth: BytesPerSecond = Field(gt=0)
    slow: BytesPerSecond | None = Field(default=None, gt=0)
    ranks: int = Field(default=1, ge=1)

    def link(self, node: int) -> float:
        """Bytes per second of a node's link."""
        return self.bandwidth if self.slow is None or node < self.nodes - 1 else self.slow

    @property
    def slowest(self) -> float:
        """Bytes per second of the slowest link."""
        return min(self.bandwidth, self.slow or self.bandwidth)

    def on(self, job: Job) -> Job:
        """The job on such a cluster of its own cluster's processes. Raises UserError for a cluster with GPUs."""
        node = job.cluster.node
        if node.gpu.sms:
            raise UserError(f"--emulate: cluster {job.cluster.name} has GPUs ({node.gpu.name}), and emulated nodes have none")
        emulated = node.model_copy(update={"gpus": self.ranks, "nics": 1, "nic": self.bandwidth})
        name = f"{job.cluster.name}, emulated"
        return replace(job, cluster=job.cluster.model_copy(update={"name": name, "node": emulated, "nodes": self.nodes}))

    def played(self, job: Job, cores: int) -> Job:
        """What `on` gives, as it is simulated: all-reduces are rings, gloo's only ones, the last node is by itself where its link
        differs, and processes of all nodes share this machine's `cores` where there are more of them.
        """
        plan = job.plan.model_copy(update={"algorithm": "all_reduce/ring"})
        more = read_effects(f"all: cores {cores}", "--emulate") if self.nodes * self.ranks > cores else ()
        alike = replace(job, plan=plan, effects=(*job.effects, *more))
        if self.slow is None:
            return alike
        node = alike.cluster.node
        last = node.model_copy(update={"nic": self.slow})
        every = [NodeGroup.model_validate({"count": count, "node": own}) for count, own in ((self.nodes - 1, node), (1, last))]
        fields = {"name": alike.cluster.name, "nodes": self.nodes, "node": node, "fabric": alike.cluster.fabric}
        return replace(alike, cluster=UnequalCluster.model_validate(fields | {"every": tuple(every)}))

    def priced(self, profile: Profile, loopback: float) -> Profile:
        """The machine's profile with prices of these links; `loopback`: bandwidth of a port as its cluster describes it.

        Communication slows compute because a core copies what is sent. Over the loopback device a core is busy with that all the
        time, behind a slow link only for the share of the time in which it could have copied as much.
        """
        inside, data = profile.link("loopback"), data_share()
        busy = min(1.0, self.slowest * data / (loopback * inside.efficiency))
        link = inside.model_copy(update={"efficiency": data})
        return profile.model_copy(
            update={
                "name": f"{profile.name}, links emulated",
                "links": dict(profile.links) | {"nic": link},
                "wire": WIRE,
                "slowdown": 1 + (profile.slowdown - 1) * busy,
            }
        )

    def said(self, carried: float) -> str:
        """What links carried beside what they should, bytes per second."""
        given, should = self.bandwidth * 8e-9, self.slowest * data_share() / 1e6
        last = f", the last of {self.slow * 8e-9:.3g}" if self.slow else ""
        return (
            f"{self.nodes} emulated nodes with links of {given:.3g} Gb/s{last}: {should:.3g} MB/s without headers, "
            f"and a bare all-reduce reached {carried / 1e6:.3g} MB/s"
        )


def data_share() -> float:
    """What of a link's bandwidth carries data: the rest is headers, which tbf counts too."""
    return (MTU - HEADERS) / (MTU + ETHERNET)


def read_emulation(text: str) -> Emulation:
    """`nodes=2,bandwidth=1Gb/s,ranks=1`. Raises UserError."""
    fields = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--emulate {text}: '{part}' must be FIELD=VALUE, as in nodes=2,bandwidth=1Gb/s,ranks=1")
        fields[name.strip()] = int(value) if value.strip().isdecimal() else value.strip()
    return build(Emulation, fields, "--emulate")


def missing() -> str | None:
    """Why this machine cannot emulate a cluster."""
    if under_launcher():
        return "a launcher has started this process, and emulated nodes are started here"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found: install iproute2 (Linux)"
    return None if os.geteuid() == 0 else "network namespaces need root"


@contextmanager
def cluster(emulation: Emulation) -> Iterator[tuple[str, ...]]:
    """The names of the nodes' namespaces. Raises UserError where this machine cannot make them."""
    why = missing()
    if why:
        raise UserError(f"--emulate: {why}")
    clear()
    switch, nodes = _name("switch"), tuple(_name(f"node{number}") for number in range(emulation.nodes))
    try:
        _make(switch)
        _ip("-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for number, node in enumerate(nodes):
            _join(emulation, switch, node, number)
        yield nodes
    finally:
        with uninterrupted():
            for name in (*nodes, switch):
                with suppress(UserError):
                    _ip("netns", "delete", name)


def clear() -> None:
    """Delete namespaces whose process is gone."""
    for line in _ip("netns", "list").splitlines():
        parts = line.split()[0].split("-") if line else []
        if len(parts) == 3 and parts[0] == NAME and not Path(f"/proc/{parts[1]}").exists():
            _ip("netns", "delete", "-".join(parts))


def _name(what: str) -> str:
    return f"{NAME}-{os.getpid()}-{what}"


def _make(namespace: str) -> None:
    _ip("netns", "add", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")


def _join(emulation: Emulation, switch: str, node: str, number: int) -> None:
    """Make a node and its cable, limited where it leaves the node and where it leaves the switch."""
    port = f"port{number}"
    _make(node)
    ends = ("name", port, "netns", switch, "mtu", str(MTU), "type", "veth", "peer", "name", DEVICE, "netns", node)
    _ip("link", "add", *ends, "mtu", str(MTU))
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", node, "address", "add", f"10.0.0.{number + 1}/24", "dev", DEVICE)
    _ip("-n", node, "link", "set", DEVICE, "up")
    rate = emulation.link(number)
    burst = max(LEAST_CREDIT, round(rate * CREDIT))
    limit = ("tbf", "rate", f"{round(rate * 8)}bit", "burst", str(burst), "latency", f"{round(QUEUE * 1e3)}ms")
    for namespace, device in ((node, DEVICE), (switch, port)):
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"--emulate: `{' '.join(words)}`: {lines[0]}")
    return done.stdout


def probe(place: Place, size: int) -> float:
    """Bytes per second that each rank sends in a ring all-reduce of `size` bytes: the median of three. Every rank calls it."""
    import statistics
    import time

    import torch
    import torch.distributed as dist

    values, rates = torch.ones(size // 4), []
    for _ in range(4):  # the first opens connections
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        rates.append(2 * (place.world - 1) / place.world * size / (time.perf_counter() - begin))
    return statistics.median(rates[1:])
