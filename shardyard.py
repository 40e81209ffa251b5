"""shardyard: how long is a training step, what does it move, what does it hold, and what would it cost to do it differently?

The front door: the command line (`shardyard --help`; its commands are the files of `reports/commands/`) and the public Python
API. It imports the rooms and holds no logic of its own.

>>> import shardyard
>>> job = shardyard.read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"data_parallel": "zero1", "sequence": 4096})
>>> timeline = shardyard.simulate(job)
>>> summary = shardyard.summarise(timeline)
>>> summary.fits
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reports.commands import main
    from reports.inputs import describe
    from sim.analysis.summary import Summary, summarise
    from sim.timeline import Timeline
    from strategies.job import Job
    from strategies.predict import predict, simulate
    from strategies.read_job import read_job
    from strategies.resilience.runs import run_days
    from strategies.together import together
    from topologies.reading import UserError

__all__ = [
    "Job",
    "Summary",
    "Timeline",
    "UserError",
    "describe",
    "main",
    "predict",
    "read_job",
    "run_days",
    "simulate",
    "summarise",
    "together",
]

_LAZY = {
    "Job": "strategies.job",
    "Summary": "sim.analysis.summary",
    "Timeline": "sim.timeline",
    "UserError": "topologies.reading",
    "describe": "reports.inputs",
    "main": "reports.commands",
    "predict": "strategies.predict",
    "read_job": "strategies.read_job",
    "run_days": "strategies.resilience.runs",
    "simulate": "strategies.predict",
    "summarise": "sim.analysis.summary",
    "together": "strategies.together",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `shardyard --help` is instant."""
    if name not in _LAZY:
        raise AttributeError(f"module 'shardyard' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__


def command_line() -> None:
    """The command `shardyard`. While its modules are imported nothing is there to be kept: Ctrl-C ends it without a word."""
    import gc
    import signal

    gc.set_threshold(50_000, 20, 20)  # what modules and programs consist of stays: looking through it takes a tenth of the time
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command itself runs
    __getattr__("main")(prog_name="shardyard")


if __name__ == "__main__":
    command_line()
