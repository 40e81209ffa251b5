"""shardyard: how long is a training step, what does it move, what does it hold, and what would it cost to do it differently?

The front door: the command line (`shardyard --help`; its commands are the files of `reports/commands/`) and the public Python
API. It imports the rooms and holds no logic of its own.

>>> import shardyard
>>> job = shardyard.read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"data_parallel": "zero1", "sequence": 4096})
>>> timeline = shardyard.simulate(job)
>>> summary = shardyard.summarise(timeline)
>>> summary.fits
True
>>> shardyard.whatif(job, {"nodes": [1, 2]}).frame()["summary.fits"].tolist()
[True, True, True]

What a command does is a function of its name: `plan`, `advise`, `whatif`, `compare`, `buy`, `run`, ….
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reports.api.decide import advise, budget, buy, compare, plan, whatif
    from reports.api.look import checkpoint, explain, export, figures, memory, report, run, sensitivity, trace, variability
    from reports.api.machine import calibrate, execute, validate
    from reports.api.parts import collective, loop, ranks, schedule, server, straggler, teach, topology
    from reports.api.result import Result
    from reports.api.step import predict
    from reports.commands import main
    from reports.inputs import describe
    from sim.analysis.summary import Summary, summarise
    from sim.timeline import Timeline
    from strategies.job import Job
    from strategies.predict import simulate
    from strategies.read_job import read_job
    from strategies.resilience.runs import run_days
    from strategies.together import together
    from topologies.reading import UserError

    __version__: str

__all__ = [
    "Job",
    "Result",
    "Summary",
    "Timeline",
    "UserError",
    "__version__",
    "advise",
    "budget",
    "buy",
    "calibrate",
    "checkpoint",
    "collective",
    "compare",
    "describe",
    "execute",
    "explain",
    "export",
    "figures",
    "loop",
    "main",
    "memory",
    "plan",
    "predict",
    "ranks",
    "read_job",
    "report",
    "run",
    "run_days",
    "schedule",
    "sensitivity",
    "server",
    "simulate",
    "straggler",
    "summarise",
    "teach",
    "together",
    "topology",
    "trace",
    "validate",
    "variability",
    "whatif",
]

_LAZY = {
    "Job": "strategies.job",
    "Result": "reports.api.result",
    "Summary": "sim.analysis.summary",
    "Timeline": "sim.timeline",
    "UserError": "topologies.reading",
    "advise": "reports.api.decide",
    "budget": "reports.api.decide",
    "buy": "reports.api.decide",
    "calibrate": "reports.api.machine",
    "checkpoint": "reports.api.look",
    "collective": "reports.api.parts",
    "compare": "reports.api.decide",
    "describe": "reports.inputs",
    "execute": "reports.api.machine",
    "explain": "reports.api.look",
    "export": "reports.api.look",
    "figures": "reports.api.look",
    "loop": "reports.api.parts",
    "main": "reports.commands",
    "memory": "reports.api.look",
    "plan": "reports.api.decide",
    "predict": "reports.api.step",
    "ranks": "reports.api.parts",
    "read_job": "strategies.read_job",
    "report": "reports.api.look",
    "run": "reports.api.look",
    "run_days": "strategies.resilience.runs",
    "schedule": "reports.api.parts",
    "sensitivity": "reports.api.look",
    "server": "reports.api.parts",
    "simulate": "strategies.predict",
    "straggler": "reports.api.parts",
    "summarise": "sim.analysis.summary",
    "teach": "reports.api.parts",
    "together": "strategies.together",
    "topology": "reports.api.parts",
    "trace": "reports.api.look",
    "validate": "reports.api.machine",
    "variability": "reports.api.look",
    "whatif": "reports.api.decide",
}


if "__path__" not in globals():  # a checkout, whose rooms lie beside this file; in the wheel they lie below it
    from topologies.documents.checkout import rooms_below_shardyard

    __path__: list[str] = []
    rooms_below_shardyard()


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `shardyard --help` is instant."""
    if name == "__version__":
        from reports.inputs import VERSION

        return VERSION
    if name not in _LAZY:
        raise AttributeError(f"module 'shardyard' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__


def command_line() -> None:
    """The command `shardyard`. While its modules are imported nothing is there to be kept: Ctrl-C ends it without a word."""
    import gc
    import os
    import signal

    gc.set_threshold(500_000, 20, 20)  # what modules and programs consist of stays: looking through it took a tenth of the time
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # for which it would look through all that is installed
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command itself runs
    try:
        __getattr__("main")(prog_name="shardyard")
    finally:
        gc.freeze()  # all of it goes with the process: Python need not look through it for cycles, which takes another tenth


if __name__ == "__main__":
    command_line()
