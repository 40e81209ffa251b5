"""The engine by hand: two GPUs and a link. The second GPU computes on what the first one sends, for three microbatches.

python examples/engine/two_devices.py
"""

from simpy import Environment

from sim.engine.device import Compute, Device, kernels
from sim.engine.network import FlowPart, Network
from sim.engine.task import start
from sim.engine.transfer import Transfer

env = Environment()
network = Network(env, capacity=[50e9])  # one link of 50 GB/s, number 0
sender, receiver = Device(env), Device(env)
over_the_link = [FlowPart(100e6, flows=((0, 1.0),))]  # 100 MB once over link 0: 2 ms

tasks = []
for _ in range(3):  # microbatches
    forward = sender.stream("compute").add(Compute(env, sender, kernels(2e-3)))
    send = sender.stream("send").add(Transfer(env, network, over_the_link), after=(forward,))
    backward = receiver.stream("compute").add(Compute(env, receiver, kernels(3e-3)), after=(send,))
    tasks += [forward, send, backward]

env.timeout(5e-3).callbacks.append(lambda _: network.change(0, 25e9))  # from 5 ms on the link is half as fast
start(tasks)
env.run()
for name, task in zip(["forward", "send", "backward"] * 3, tasks, strict=True):
    print(f"{name:8} {1e3 * task.start:5.1f} to {1e3 * task.end:5.1f} ms")
