"""What a language model may ask, as tools of the Model Context Protocol: each is a command, answered as data.

Nothing is written, modules are not run, and files outside the folder are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reports.explorer import answers
from reports.explorer.search import LONGEST, search
from reports.explorer.session import Session
from reports.formatting import TOKENS
from strategies.job import Job
from strategies.predict import predict
from topologies.reading import UserError, argument, is_there, line_of, nearest

INSTRUCTIONS = """shardyard predicts training steps of models on clusters by simulation. Of a job, `changes` are texts such as
"plan.tp=8", "plan.data_parallel=zero3", "plan.pp=4", "plan.global_batch=512", "plan.sequence=8192", "cluster.node.nic=50 GB/s".
Times are seconds, sizes bytes. A mistake is answered by one line that says what is wrong and the nearest right thing. `names`
lists models and clusters, `explain` tells what a term means."""

Data = dict[str, Any]


class Asked(BaseModel):
    """A job: a file, or a model and a cluster, and what is changed of it."""

    model_config = ConfigDict(extra="forbid")

    file: str = Field("", description="YAML of a job, inside the folder")
    model: str = Field("", description="name of a model, or a config.json inside the folder")
    cluster: str = Field("", description="name of a cluster")
    nodes: int = Field(0, ge=0, description="number of nodes; 0: as the file says, or 1")
    changes: list[str] = Field([], description='fields as FIELD=VALUE: "plan.tp=4"')


class Tools:
    """folder: the only one whose files are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def every(self) -> list[Callable[..., Any]]:
        """The tools, by the names of their functions."""
        return [self.simulate, self.memory, self.plan, self.whatif, self.run, self.export, self.explain, self.names]

    def _session(self, job: Asked) -> Session:
        """The job that changes are made to."""
        path = self.folder / job.file
        if job.file and not (is_there(path, folder=False) and path.resolve().is_relative_to(self.folder.resolve())):
            raise UserError(f"file={job.file}: is no file of {self.folder}")
        given = {"model": job.model or None, "cluster": job.cluster or None, "nodes": job.nodes or None}
        session = Session(str(path) if job.file else None, given, self.folder)
        for name in filter(None, (job.model, job.cluster)):
            session.check(name)
        return session

    def _read(self, job: Asked) -> tuple[Job, dict[str, float]]:
        texts, own = answers.asked(job.changes)
        return self._session(job).job(texts), own

    def simulate(self, job: Asked) -> Data:
        """One training step: verdict, step time, tokens/s, MFU, breakdown in seconds, peak memory by stage, traffic, notes."""
        session, (texts, own) = self._session(job), answers.asked(job.changes)
        asked = session.job(texts)
        data = answers.answer(asked, own)
        command = answers.taken_away(session, texts, asked)["command"]
        return {
            "verdict": data["verdict"],
            "fits": data["fits"],
            "step_seconds": data["step"],
            "tokens_per_second": data["tokens_per_second"],
            "mfu": data["mfu"],
            "headline": {label: value for label, value, _ in answers.interval(asked, own)["cards"]},
            "breakdown": {part["name"]: part["seconds"] for part in data["breakdown"]},
            "memory": [{"stage": stage["stage"], "peak": stage["peak"]} for stage in data["memory"]],
            "capacity": data["capacity"],
            "volume": {axis: size for axis, size, _ in data["volume"]},
            "notes": data["notes"],
            "plan": data["resolved"],
            "command": command,
        }

    def memory(self, job: Asked) -> Data:
        """What each part of the model holds on the fullest GPU, by kind, and the textbook's counts beside it. Bytes."""
        from strategies.memory_by_layer import memory_by_layer

        asked, _ = self._read(job)
        return memory_by_layer(asked, predict(asked)).to_dict()

    def plan(self, job: Asked, every: bool = False, seconds: float = 60.0) -> Data:
        """The best plans: of the usual ways to train, or (every) of all plans, proven if `seconds` suffice. The changes of a plan
        can be given to the other tools.
        """
        *_, last = search(self._session(job), answers.asked(job.changes)[0], min(LONGEST, max(1.0, seconds)), every)
        if "error" in last:
            raise UserError(last["error"])
        return {"verdict": last["verdict"], "tried": last["of"], "plans": last["plans"]}

    def whatif(self, job: Asked, field: str, values: list[str | int | float]) -> list[Data]:
        """Steps of the job with a field at several values: nodes, plan.microbatch, cluster.node.nic …"""
        session, changes = self._session(job), answers.asked(job.changes)[0]
        session.find_plan(changes)
        return answers.curve(answers.varied(session, changes, field, [f"{field}={value}" for value in values]))

    def run(self, job: Asked, tokens: float = TOKENS) -> Data:
        """Training until so many tokens, with failures and checkpoints: days, goodput, cost, where GPU-time goes (20 runs)."""
        asked, own = self._read(job)
        data = answers.days(asked, own | answers.asked([argument("tokens", tokens)])[1])
        return {**{label: value for label, value, _ in data["cards"]}, "shares": dict(data["shares"]), "notes": data["notes"]}

    def export(self, job: Asked, framework: str) -> Data:
        """The plan as settings of a framework (megatron, deepspeed, accelerate, torchtitan …), and what they cannot express."""
        from strategies.frameworks.export import export

        written = export(framework, self._read(job)[0])
        return {"file": written.file, "text": written.text, "launch": written.launch, "unexpressed": list(written.unexpressed)}

    def explain(self, term: str) -> str:
        """What a metric, a field or a word of distributed training means, with formula, unit and source."""
        from reports.glossary import explain

        return explain(term)

    def names(self, sort: str) -> list[str]:
        """Names that can be used: sort is models, clusters, profiles, schedules, data_parallel, optimizers, effects …"""
        from reports.commands.list import catalogues

        known = catalogues()
        if sort not in known:
            raise UserError(f"unknown list '{sort}'{nearest(sort, known)}")
        return list(known[sort]())


def serve(folder: Path) -> None:
    """Answer on standard input and output until it is closed. Raises UserError where the library is not installed."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver import Context
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.server.mcpserver.tools import Tool
    except ImportError:
        raise UserError("shardyard mcp needs the package mcp: pip install 'shardyard[mcp]'") from None
    from reports.inputs import VERSION

    class Told(Tool):
        """A tool that answers mistakes with one line, those in the shape of its arguments too."""

        async def run(self, arguments: Data, context: Context[Any, Any], convert_result: bool = False) -> Any:
            known = self.fn_metadata.arg_model.model_fields
            for name in arguments:
                if name not in known:
                    raise ToolError(f"{self.name}: unknown argument '{name}'{nearest(name, known)}")
            try:
                return await super().run(arguments, context, convert_result)
            except ToolError as error:
                if isinstance(error.__cause__, ValidationError):
                    raise ToolError(f"{self.name}: {line_of(error.__cause__, self.fn_metadata.arg_model)}") from None
                raise

    def told(tool: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(tool)
        def answer(*arguments: Any, **named: Any) -> Any:
            try:
                return tool(*arguments, **named)
            except UserError as error:
                raise ToolError(str(error)) from None

        return answer

    tools: list[Tool] = [Told.from_function(told(tool)) for tool in Tools(folder).every]
    MCPServer("shardyard", tools=tools, instructions=INSTRUCTIONS, version=VERSION, log_level="WARNING").run("stdio")
