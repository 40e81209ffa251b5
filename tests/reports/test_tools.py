"""What a language model is told over stdio is what the commands say."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import shardyard
from reports.explorer.tools import Asked, Tools
from topologies.reading import UserError

ROOT = Path(__file__).parents[2]
JOB = {"model": "llama-2-7b", "cluster": "dgx-h100", "changes": ["plan.data_parallel=zero1", "plan.tp=2"]}


@pytest.fixture(scope="module")
def tools() -> Tools:
    return Tools(ROOT / "examples")


def test_over_stdio_with_a_client_of_the_protocol() -> None:
    pytest.importorskip("mcp")
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    mistakes = {
        "unknown field 'job.modle'; did you mean 'model'?": {"job": {"modle": "llama-2-7b"}},
        "job.nodes='two'": {"job": JOB | {"nodes": "two"}},
        "job.changes='plan.tp=2'": {"job": JOB | {"changes": "plan.tp=2"}},
        "field 'job' is required": {},
        "unknown argument 'jobs'; did you mean 'job'?": {"job": JOB, "jobs": JOB},
        "did you mean 'tp'?": {"job": JOB | {"changes": ["plan.tpp=2"]}},
    }

    async def talk() -> tuple[list[str], Any, list[Any]]:
        command = StdioServerParameters(command=sys.executable, args=[str(ROOT / "shardyard.py"), "mcp"], cwd=ROOT)
        async with stdio_client(command) as (reading, writing), ClientSession(reading, writing) as client:
            await client.initialize()
            names = [tool.name for tool in (await client.list_tools()).tools]
            answer = await client.call_tool("simulate", {"job": JOB})
            return names, answer, [await client.call_tool("simulate", mistake) for mistake in mistakes.values()]

    names, answer, refused = asyncio.run(talk())
    assert names == ["simulate", "memory", "plan", "whatif", "run", "export", "explain", "names"]
    step = shardyard.predict(shardyard.read_job(None, JOB["changes"], model="llama-2-7b", cluster="dgx-h100")).step_seconds
    assert json.loads(answer.content[0].text)["step_seconds"] == step
    for line, told in zip(mistakes, refused, strict=True):
        assert told.is_error
        assert line in told.content[0].text
        assert "\n" not in told.content[0].text


def test_each_tool_answers(tools: Tools) -> None:
    job = Asked.model_validate(JOB)
    assert tools.memory(job)["parts"]
    assert [point["value"] for point in tools.whatif(job, "nodes", ["1", "2"])] == ["nodes=1", "nodes=2"]
    assert tools.whatif(job, "nodes", [1])[0] == tools.whatif(job, "nodes", ["1"])[0]
    assert tools.run(job, 1e11)["goodput"].endswith("%")
    for tokens in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="must be a positive number|numbers are finite"):
            tools.run(job, tokens)
    assert "--tensor-model-parallel-size" in tools.export(job, "megatron")["text"]
    assert "sends along an axis" in tools.explain("volume")
    assert "dgx-h100" in tools.names("clusters")
    best = tools.plan(Asked.model_validate(JOB | {"changes": ["plan.global_batch=8"]}))["plans"][0]
    asked = Asked.model_validate(JOB | {"changes": ["plan.global_batch=8", *best["changes"]]})
    assert tools.simulate(asked)["step_seconds"] == best["step"]


def test_a_file_of_the_folder_is_read_and_no_other(tools: Tools) -> None:
    assert tools.simulate(Asked(file="llama-3.1-70b.yaml"))["verdict"].startswith("llama-3.1-70b")
    for given in ({"file": "../pyproject.toml"}, {"file": "/etc/hostname"}, {"file": "."}, JOB | {"model": "/etc/hostname"}):
        with pytest.raises(UserError):
            tools.simulate(Asked.model_validate(given))
