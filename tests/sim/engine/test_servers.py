"""Parameter servers against closed forms, and their links against the network of the engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simpy import Environment

from sim.engine.network import FlowPart, Network
from sim.engine.parameter_servers import Pool, Setting, play

S, B = 2e9, 1e9
BASE = Setting(workers=8, compute=1.0, gradient=S, parameters=S, into=B, out=B, worker=10 * B)


@pytest.mark.parametrize("most", [10.0, 0.3])
def test_pool_is_the_network(most) -> None:
    """Random transfers end when they do on the fluid network of a shared link and one link for each user."""
    rng = np.random.default_rng(1)
    jobs = list(zip(rng.uniform(0, 20, 60).tolist(), rng.uniform(0.1, 2, 60).tolist(), strict=True))

    def ends(shared: bool) -> dict[int, float]:
        env, moments = Environment(), {}
        pool = Pool(env, 1.0, most)
        network = Network(env, [1.0, *[most] * len(jobs)])

        def user(number, start, size):
            yield env.timeout(start)
            if shared:
                yield pool.carry(size)
            else:
                done = env.event()
                network.start([FlowPart(size, ((0, 1.0), (1 + number, 1.0)))], 0.0, done.succeed)
                yield done
            moments[number] = env.now

        for number, (start, size) in enumerate(jobs):
            env.process(user(number, start, size))
        env.run()
        return moments

    assert ends(True) == pytest.approx(ends(False), abs=1e-6)


@pytest.mark.parametrize("workers", [1, 4, 32])
def test_synchronous_step(workers) -> None:
    """One server and n workers: compute, n·S/B in, update, n·S/B out; no gradient is stale."""
    played = play(replace(BASE, workers=workers, update=0.5, latency=0.25), steps=5, bound=0)
    assert played.seconds == pytest.approx(5 * (1 + workers * S / B + 0.25 + 0.5 + 0.25 + workers * S / B))
    assert played.staleness.histogram == {0: 4 * workers}
    assert played.updating == pytest.approx(5 * 0.5 / played.seconds)


def test_more_servers_until_the_workers_link_is_full() -> None:
    """k servers take n·S/(k·B), but a worker no less than S/B."""
    for servers, seconds in ((1, 16.0), (2, 8.0), (8, 2.0), (64, 2.0)):
        played = play(replace(BASE, compute=0.0, into=servers * B, out=servers * B, worker=B), steps=3, bound=0)
        assert played.seconds == pytest.approx(3 * 2 * seconds)


@pytest.mark.parametrize("workers", [1, 2, 7, 64])
@pytest.mark.parametrize("update", [0.0, 0.1])
def test_asynchronous_staleness_of_equal_workers(workers, update) -> None:
    """n − 1: between a pull and the update that follows from it every other worker updates once."""
    played = play(replace(BASE, workers=workers, update=update), steps=6)
    assert played.staleness.histogram == {workers - 1: 5 * workers}


def test_mean_staleness_with_jitter() -> None:
    """Updates are shared out: the mean stays n − 1 whatever compute times do, the distribution widens."""
    stale = play(replace(BASE, workers=16, compute=100.0), steps=1000, jitter=0.5).staleness
    assert stale.mean == pytest.approx(15, rel=0.015)  # at the very end some have stopped
    assert stale.p99 > 1.5 * 15
    assert sum(stale.histogram.values()) == 16 * 999


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_bounded_staleness(bound) -> None:
    """No worker is more than `bound` steps ahead of the slowest; so no gradient has missed more than (2·bound + 1)(n − 1)."""
    setting = replace(BASE, compute=100.0)
    played = play(setting, steps=100, bound=bound, jitter=1.0)
    assert played.staleness.ahead == bound
    assert played.staleness.largest <= (2 * bound + 1) * (setting.workers - 1)
    assert play(setting, steps=100, jitter=1.0).staleness.ahead > bound


def test_the_looser_the_faster() -> None:
    """Waiting for the slowest of 8 costs time; a bound costs less, none nothing."""
    seconds = [play(replace(BASE, compute=100.0), 100, bound, jitter=1.0).seconds for bound in (0, 1, 4, None)]
    assert seconds == sorted(seconds, reverse=True)


def test_throughput_ends_at_the_servers_link() -> None:
    """Gradients per second: synchronous B/(2S), since pushes and pulls take turns; asynchronous B/S, since links are duplex."""
    for bound, compute, jitter, most in ((0, 1.0, 0.0, B / (2 * S)), (None, 30.0, 0.5, B / S)):
        played = play(replace(BASE, workers=64, compute=compute), 100, bound, jitter)
        assert 0.95 * most < played.gradients_per_second <= most
    assert played.pushing == pytest.approx(1.0, abs=0.05)


def test_throughput_ends_at_the_updates() -> None:
    played = play(replace(BASE, workers=64, update=5.0), 20)
    assert played.gradients_per_second == pytest.approx(1 / 5.0, rel=0.03)
    assert played.updating > 0.97


def test_a_seed_is_a_run() -> None:
    first, again, other = (play(BASE, 20, None, 0.3, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.seconds != other.seconds
