"""Memory by layer: parts add up to what the ledger holds, and the textbook's counts stand beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import read_job, simulate, summarise
from sim.analysis.summary import Summary
from strategies.job import Job
from strategies.memory_by_layer import ByLayer, memory_by_layer


def played(model: Any = "llama-3.1-8b", nodes: int = 1, **plan: Any) -> tuple[Job, Summary, ByLayer]:
    job = read_job(
        None, model=model, cluster="dgx-h100", nodes=nodes, plan={"auto": False, "sequence": 2048, "global_batch": 64, **plan}
    )
    summary = summarise(simulate(job))
    return job, summary, memory_by_layer(job, summary)


@pytest.mark.parametrize(
    "plan",
    [
        {"data_parallel": "ddp"},
        {"data_parallel": "zero1", "gradients": "fp32"},
        {"data_parallel": "zero1", "tp": 4, "sequence_parallel": True},
        {"data_parallel": "zero1", "pp": 4},
        {"data_parallel": "zero1", "pp": 2, "schedule": "interleaved", "chunks": 4, "microbatch": 2},
        {"data_parallel": "zero1", "optimizer": "muon"},
        {"data_parallel": "zero2", "kernels": "torch"},
        {"data_parallel": "ddp", "recompute": "full"},
    ],
    ids=str,
)
def test_parts_add_up_to_what_the_ledger_holds(plan: dict[str, Any]) -> None:
    job, summary, memory = played(**plan)
    for kind in ("parameter", "optimizer"):
        total = sum(part.count * part.states[kind] for part in memory.parts)
        assert total == pytest.approx(summary.worst.kinds[kind], rel=1e-3)
    kept = sum(part.count * part.activations for part in memory.parts)
    assert memory.microbatches * kept == pytest.approx(summary.worst.kinds["activation"])
    layers = [part for part in memory.parts if part.name.startswith("layer")]
    assert sum(part.count for part in layers) == job.model.layers / job.plan.pp
    tensors = [sum(part.tensors.values()) for part in layers]
    assert tensors == pytest.approx([part.activations for part in layers])


def test_parameters_by_hand() -> None:
    _, _, memory = played()
    names = [(part.name, part.count, part.parameters) for part in memory.parts]
    layer = 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 2 * 4096
    assert names == [
        ("embedding", 1, 128256 * 4096),
        ("layer 0–31", 32, layer),
        ("head and loss", 1, 128256 * 4096 + 4096),
    ]


def test_kinds_of_layers_are_told_apart() -> None:
    model = Path(__file__).parents[1] / "data/models/gemma-3-1b.json"
    _, _, memory = played(str(model), sequence=1024)
    assert [part.name for part in memory.parts][1:3] == ["layer 0–4, 6–10, 12–16 … 24–25", "layer 5, 11, 17, 23"]


def test_the_textbook_by_its_rules() -> None:
    """GPT-2 1.5B, 32 sequences of 1,024 tokens: 16 bytes per parameter, and 56.4 GiB of activations by the ZeRO paper's rule."""
    _, _, memory = played("gpt2-1.5b", sequence=1024, microbatch=32, global_batch=256, data_parallel="zero1")
    textbook = [state.textbook for state in memory.states if state.textbook]
    assert textbook == [2, 2, 12]
    rules = {rule.rule: rule.bytes for rule in memory.activations}
    zero, megatron = (next(size for name, size in rules.items() if mark in name) for mark in ("1910.02054", "2205.05198"))
    assert round(zero / 2**30, 1) == 56.4
    assert megatron == 48 * 1024 * 32 * 1600 * (34 + 5 * 25 * 1024 / 1600)
    assert any("sharded over 8 ranks (zero1)" in state.why for state in memory.states)


def test_a_materialised_gpt_keeps_what_the_rule_says() -> None:
    """Korthikanti et al. count tensors of Megatron-LM in 16 bits with dropout; their 34 + 5·a·s/h emerge from its operators."""
    plan = {"attention": "materialised", "dropout": True, "kernels": "apex", "sequence": 1024, "microbatch": 4}
    _, _, memory = played("gpt-1.7b", **plan)
    layers = next(rule.bytes for rule in memory.activations if "its layers alone" in rule.rule)
    rule = next(rule.bytes for rule in memory.activations if "2205.05198" in rule.rule)
    assert layers == pytest.approx(rule, rel=0.005)


@pytest.mark.usefixtures("undrawn")
def test_the_command_and_the_page(tmp_path: Path) -> None:

    def asked(*options: str) -> str:
        words = ["simulate", "--model", "gpt2-1.5b", "--cluster", "dgx-h100", *options]
        result = CliRunner().invoke(shardyard.main, words)
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = asked("--by-layer", "--report", str(tmp_path))
    for text in ("layer 0–47", "bytes per parameter", "together", "mlp up output", "arXiv:1910.02054"):
        assert text in shown
    page = (tmp_path / "report.html").read_text()
    assert "Memory by layer" in page
    assert "layer 0–47" in page
    data = json.loads(asked("--by-layer", "--json"))
    assert [part["name"] for part in data["by_layer"]["parts"]] == ["embedding", "layer 0–47", "head and loss"]
    assert "by_layer" not in json.loads(asked("--json"))
