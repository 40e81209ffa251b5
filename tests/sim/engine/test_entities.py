"""Devices, streams, hosts, links and rendezvous by themselves, with times worked out by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from simpy import Environment

from sim.engine.device import Compute, Device, kernels
from sim.engine.host import Host
from sim.engine.network import FlowPart, Network
from sim.engine.rendezvous import Rendezvous
from sim.engine.task import Stream, Task, start
from sim.engine.transfer import CollectiveTransfer, Transfer
from sim.pricing.block_costs import BlockCost

ROOT = Path(__file__).parents[3]


class Wait(Task):
    """Lasts for some seconds."""

    __slots__ = ("seconds",)

    def __init__(self, env: Environment, seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds

    def begin(self) -> None:
        self.env.timeout(self.seconds).callbacks.append(lambda _: self.finish())


def ends(env: Environment, *tasks: Task) -> list[float | None]:
    start(tasks)
    env.run()
    return [task.end for task in tasks]


def test_a_stream_is_in_order_and_waits_for_what_it_is_told() -> None:
    env = Environment()
    stream, other = Stream(), Stream()
    a, b = stream.add(Wait(env, 2.0)), stream.add(Wait(env, 1.0))
    c = other.add(Wait(env, 1.0))
    d = other.add(Wait(env, 1.0), after=(a, a, c))  # named twice, waited for once
    assert ends(env, a, b, c, d) == [2.0, 3.0, 1.0, 3.0]


def test_what_waits_for_itself_never_ends() -> None:
    env = Environment()
    a, b = Wait(env, 1.0), Wait(env, 1.0)
    a.wait_for(b)
    b.wait_for(a)
    assert ends(env, a, b) == [None, None]


def test_a_device_runs_one_block_at_a_time_as_its_host_launches_them() -> None:
    """The first block's last kernel is launched at 3 s and takes 1 s; the second is launched from 3 s on."""
    env = Environment()
    device = Device(env)
    blocks = [Compute(env, device, BlockCost(2.0, 4.0, 3.0, {}, 2.0)), Compute(env, device, kernels(2.0))]
    for block in blocks:
        device.host.launch(block, behind=block.cost.host)
        device.stream("compute").add(block)
    assert ends(env, *blocks) == [4.0, 6.0]
    assert [block.launched for block in blocks] == [0.0, 3.0]


def test_a_host_that_is_held_up_launches_later() -> None:
    env = Environment()
    device, host = Device(env), Host()
    first, second, third = Wait(env, 5.0), Wait(env, 1.0), Wait(env, 1.0)
    host.launch(first, ahead=1.0)
    host.launch(second, ahead=1.0, holds=True)  # the host sees the end of the first one
    host.launch(third, ahead=1.0)
    for task in (first, second, third):
        device.stream("compute").add(task)
    ends(env, first, second, third)
    assert [task.launched for task in (first, second, third)] == [1.0, 6.0, 7.0]


def test_what_waits_for_nothing_but_its_launch_begins_when_a_held_up_host_has_launched_it() -> None:
    """The host waits for 5 s of work, and launches the transfer of a second a second later, on a stream of its own."""
    env = Environment()
    network = Network(env, [1e9])
    host, waited, held = Host(), Wait(env, 5.0), Wait(env, 1.0)
    transfer = Transfer(env, network, [FlowPart(1e9, ((0, 1.0),))])
    host.launch(waited)
    host.launch(held, holds=True)
    host.launch(transfer, ahead=1.0)
    held.wait_for(waited)
    assert ends(env, waited, held, transfer) == [5.0, 6.0, 7.0]
    assert transfer.start == 6.0


@pytest.mark.parametrize(
    ("begin", "busy", "end"), [(0.0, 1.0, 1.0), (0.0, 2.0, 5.0), (2.0, 1.0, 5.0), (5.0, 1.0, 6.0), (4.0, 8.0, 17.0)]
)
def test_a_host_without_its_core_does_nothing(begin: float, busy: float, end: float) -> None:
    """It is away from 1 s to 4 s, in two pauses that overlap, and from 10 s to 15 s."""
    host = Host([(10.0, 5.0), (1.0, 2.0), (2.0, 2.0)])
    assert list(host.pauses) == [(1.0, 3.0), (10.0, 5.0)]
    assert host.through(begin, busy) == end


def test_compute_slows_down_while_a_collective_works() -> None:
    """3 s of gathering let 1.5 s of 4 s of kernels pass, the rest takes 2.5 s; a second device has nothing beside it."""
    env = Environment()
    network = Network(env, [1e9])
    devices = [Device(env, slowdown=2.0), Device(env, slowdown=2.0)]
    computes = [Compute(env, device, kernels(4.0)) for device in devices]
    gather = CollectiveTransfer(env, network, [FlowPart(3e9, ((0, 1.0),))], 0.0, devices[0], 1.0, None)
    assert ends(env, *computes, gather) == [5.5, 4.0, 3.0]
    assert [compute.stretch for compute in computes] == [1.5, 0.0]


def test_the_collective_that_slows_most_says_how_much() -> None:
    """One slows by 1.5 times as much as others, which add nothing to it: 3 s let 3 / 2.5 s of kernels pass."""
    env = Environment()
    network, device = Network(env, [1e9, 1e9]), Device(env, slowdown=2.0)
    compute = Compute(env, device, kernels(4.0))
    gathers = [
        CollectiveTransfer(env, network, [FlowPart(3e9, ((link, 1.0),))], 0.0, device, working, None)
        for link, working in enumerate((1.5, 0.5))
    ]
    assert ends(env, compute, *gathers) == pytest.approx([3.0 + 4.0 - 3 / 2.5, 3.0, 3.0])


def test_a_collective_starts_when_the_last_of_its_ranks_has_come() -> None:
    env = Environment()
    network = Network(env, [1e9])
    meeting: Rendezvous[CollectiveTransfer] = Rendezvous(2)
    devices = [Device(env), Device(env)]
    parts = [FlowPart(2e9, ((0, 1.0),))]
    members = [CollectiveTransfer(env, network, parts, 0.5, device, 1.0, lambda: meeting) for device in devices]
    late = Compute(env, devices[1], kernels(3.0))
    members[1].wait_for(late)
    assert ends(env, *members, late) == [5.5, 5.5, 3.0]
    assert [member.start for member in members] == [3.0, 3.0]


def test_a_transfer_waits_for_its_launch() -> None:
    env = Environment()
    transfer = Transfer(env, Network(env, [1e9]), [FlowPart(1e9, ((0, 1.0),))], 0.25)
    transfer.launched = 2.0
    assert ends(env, transfer) == [3.25]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(1.0, 0.5e9)], 1 + 3 / 0.5),
        ([(1.0, 0.0), (3.0, 1e9)], 6.0),  # nothing for two seconds
        ([(1.0, 2e9), (2.0, 1e9)], 3.0),
        ([(9.0, 0.0)], 4.0),
    ],
)
def test_a_link_that_changes(changes: list[tuple[float, float]], expected: float) -> None:
    env = Environment()
    network = Network(env, [1e9])
    transfer = Transfer(env, network, [FlowPart(4e9, ((0, 1.0),))])
    for time, capacity in changes:
        env.timeout(time).callbacks.append(lambda _, capacity=capacity: network.change(0, capacity))
    assert ends(env, transfer) == [expected]


def test_two_flows_share_a_link_that_changes() -> None:
    """Each has 0.5 GB/s, from 2 s on 1 GB/s: 1 GB and then 1 GB, both end at 3 s; a third on another link does not notice."""
    env = Environment()
    network = Network(env, [1e9, 1e9])
    sends = [Transfer(env, network, [FlowPart(2e9, ((link, 1.0),))]) for link in (0, 0, 1)]
    env.timeout(2.0).callbacks.append(lambda _: network.change(0, 2e9))
    assert ends(env, *sends) == [3.0, 3.0, 2.0]


def test_the_example_with_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Until 5 ms the second send is half done; its other half takes 2 ms, and the third send 4 ms."""
    runpy.run_path(str(ROOT / "examples/engine/two_devices.py"), run_name="__main__")
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "forward    0.0 to   2.0 ms",
        "send       2.0 to   4.0 ms",
        "backward   4.0 to   7.0 ms",
        "forward    2.0 to   4.0 ms",
        "send       4.0 to   7.0 ms",
        "backward   7.0 to  10.0 ms",
        "forward    4.0 to   6.0 ms",
        "send       7.0 to  11.0 ms",
        "backward  11.0 to  14.0 ms",
    ]


def test_a_transfer_that_is_launched_in_time_needs_no_event_for_it() -> None:
    """One that its host launches later has one event more."""

    def events(launched: float) -> int:
        env = Environment()
        network = Network(env, [1.0])
        transfer = Transfer(env, network, [FlowPart(2.0, ((0, 1.0),))])
        transfer.launched = launched
        transfer.begin()
        env.run()
        assert (transfer.start, transfer.end) == (launched, launched + 2.0)
        return len(network.scheduled)

    assert events(1.0) == events(0.0) + 1
