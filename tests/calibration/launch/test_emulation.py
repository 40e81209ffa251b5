"""Network namespaces as nodes: what they cost is their links', and nothing of them stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from calibration.launch import emulation
from calibration.launch.emulation import PROBE, Emulation, cluster, data_share, missing, probe, read_emulation
from calibration.launch.local import DEVICE
from calibration.launch.ranks import launch
from calibration.validation_set import read_set
from strategies.predict import predict, profile_of
from topologies.reading import UserError

TINY = ["model.hidden=32", "model.heads=4", "model.layers=4", "model.vocabulary=64", "model.context=16"]
needs_root = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def limit(namespace: str, device: str) -> tuple[float, float]:
    """Bytes per second of the limit at one end of a cable, and bytes that have passed it."""
    words = ["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device]
    (shown,) = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert shown["kind"] == "tbf"
    return shown["options"]["rate"], shown["bytes"]


@needs_root
@pytest.mark.parametrize(
    "fields", [{"nodes": 2, "bandwidth": "400 Mb/s"}, {"nodes": 3, "bandwidth": "1 Gb/s", "slow": "200 Mb/s"}], ids=str
)
def test_what_ranks_send_passes_links_of_their_bandwidth_and_the_namespaces_go(fields: dict[str, Any]) -> None:
    """Limits count headers too: 1,448 of 1,514 bytes are data. In each of four all-reduces a rank sends 2(W−1)/W of a buffer, and
    receives as much; what is more are acknowledgements and the ranks' meeting. Idle links save up 2 ms, so that a little more
    passes than their bandwidth.
    """
    asked, size = Emulation.model_validate(fields), PROBE // 4
    with cluster(asked) as nodes:
        assert all(node in namespaces() for node in nodes)
        carried = min(launch(probe, asked.nodes, size, nodes=nodes))
        switch = nodes[0].replace("node0", "switch")
        ends = [[limit(node, DEVICE), limit(switch, f"port{number}")] for number, node in enumerate(nodes)]
    assert 0 < carried < 1.3 * asked.slowest * data_share()
    sent = 4 * 2 * (asked.nodes - 1) / asked.nodes * size
    for number, both in enumerate(ends):
        for rate, passed in both:
            assert rate == pytest.approx(asked.link(number), rel=1e-3)
            assert 1 < passed * data_share() / sent < 1.1
    assert all(node not in namespaces() for node in nodes)


@needs_root
def test_an_interrupted_run_leaves_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), cluster(Emulation.model_validate({"nodes": 2, "bandwidth": "1 Gb/s"})) as nodes:
        raise KeyboardInterrupt
    assert all(node not in namespaces() for node in nodes)


@needs_root
def test_what_a_killed_run_left_is_cleared() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = f"{emulation.NAME}-{gone.pid}-node0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    emulation.clear()
    assert left not in namespaces()


def test_where_the_network_dominates_a_step_is_its_bytes_over_its_bandwidth() -> None:
    """DDP sends 2Ψ(W−1)/W elements of 4 bytes, FSDP over gloo 4Ψ(W−1)/W: its reduce-scatter is an all-reduce inside. Of two
    ranks' all-gathers, half of that, every second half waits for the other's first.
    """
    asked = Emulation.model_validate({"nodes": 2, "bandwidth": "10 Mb/s"})
    for job, volume in zip(read_set(None, (), ["DDP", "ZeRO-3"]), (1.0, 1.0 + 1.5), strict=True):
        emulated = replace(asked.on(job), plan=job.plan.model_copy(update={"overlap": False}))
        step = predict(emulated, asked.priced(profile_of(job), job.cluster.node.loopback)).step_seconds
        assert step == pytest.approx(volume * 4 * job.model.parameters / (asked.bandwidth * data_share()), rel=0.05)


def test_a_ring_over_unequal_links_takes_what_the_slowest_takes() -> None:
    """Of three nodes the last has a fifth: 2Ψ·2/3 elements of 4 bytes leave every node."""
    asked = Emulation.model_validate({"nodes": 3, "bandwidth": "10 Mb/s", "slow": "2 Mb/s"})
    (job,) = read_set(None, (), ["DDP"], processes=3)
    played = asked.played(asked.on(replace(job, plan=job.plan.model_copy(update={"overlap": False}))), 64)
    step = predict(played, asked.priced(profile_of(job), job.cluster.node.loopback)).step_seconds
    assert step == pytest.approx(4 / 3 * 4 * job.model.parameters / (asked.slowest * data_share()), rel=0.05)
    assert [asked.link(node) for node in range(3)] == [1.25e6, 1.25e6, 2.5e5]


def test_all_reduces_of_emulated_nodes_are_rings() -> None:
    """gloo has no tree, in which a node would send 2Ψ: of four nodes each sends 2Ψ·3/4 elements."""
    asked = Emulation.model_validate({"nodes": 4, "bandwidth": "400 Mb/s", "slow": "200 Mb/s"})
    (job,) = read_set(None, TINY, ["DDP"], processes=4)
    volume = predict(asked.played(asked.on(job), 64), asked.priced(profile_of(job), job.cluster.node.loopback)).volume["dp"]
    assert volume.bytes == 4 * 1.5 * job.model.parameters


def test_more_processes_than_cores_share_them() -> None:
    """Links that take no time: two processes of each of two nodes, that do the same at the same times, on 4, 3 and 2 cores."""
    job = read_set(None, TINY, ["DDP"], processes=4)[0]
    asked = Emulation.model_validate({"nodes": 2, "bandwidth": "100 Tb/s", "ranks": 2})
    prices = asked.priced(profile_of(job), job.cluster.node.loopback)
    computing = [predict(asked.played(asked.on(job), cores), prices).breakdown for cores in (4, 3, 2)]
    shared = [parts.get("shared cores", 0.0) for parts in computing]
    kernels = computing[0]["forward"] + computing[0]["backward"] + computing[0]["optimizer"]
    assert shared[0] == 0
    assert shared[1] == pytest.approx(kernels / 3, rel=0.1)
    assert shared[2] == pytest.approx(kernels, rel=0.1)


def test_a_slow_link_leaves_cores_to_compute() -> None:
    job = read_set(None, TINY, ["DDP"])[0]
    profile, loopback = profile_of(job), job.cluster.node.loopback
    slow, fast = (
        Emulation.model_validate({"nodes": 2, "bandwidth": speed}).priced(profile, loopback).slowdown
        for speed in ("10 Mb/s", "400 Gb/s")
    )
    assert slow == pytest.approx(1, abs=0.01)
    assert fast == profile.slowdown


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nodes=2", "field 'bandwidth' is required"),
        ("nodes=1,bandwidth=1Gb/s", "nodes=1: input should be greater than or equal to 2"),
        ("nodes=2,bandwidth=1", "needs a unit"),
        ("nodes=2,bandwidth=1Gb/s,width=2", "unknown field 'width'"),
        ("two", "must be FIELD=VALUE"),
    ],
)
def test_mistakes_are_one_line(text, line) -> None:
    with pytest.raises(UserError, match=line):
        read_emulation(text)


def test_without_root_or_tools_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    with pytest.raises(UserError, match="network namespaces need root"), cluster(read_emulation("nodes=2,bandwidth=1Gb/s")):
        pass
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "install iproute2" in str(missing())
