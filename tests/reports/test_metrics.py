"""The glossary is complete, and finds what people type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from reports.metrics import METRICS, explain, metric, metric_names
from shardyard import read_job, simulate
from sim.analysis.breakdown import AXES
from sim.analysis.stage_memory import NodeMemory
from sim.analysis.summary import VARIABILITY, Summary, summarise
from sim.replay.waiting import GpuVariability
from topologies.reading import UserError


def keys(data: Any, path: str = "") -> Iterator[str]:
    """Paths of all entries, with * for axes and positions in lists."""
    pairs = enumerate(data) if isinstance(data, list | tuple) else data.items() if isinstance(data, dict) else ()
    for name, value in pairs:
        where = f"{path}{'*' if name in AXES or isinstance(name, int) else name}"
        if not isinstance(name, int) and name not in AXES:
            yield where
        yield from keys(value, f"{where}.")


def test_every_key_of_the_summary_is_explained(summary: Summary) -> None:
    summary = replace(
        summary,
        offloaded=NodeMemory(0, 1.0, 2.0, 1.0, 2.0),
        variability=GpuVariability(0.02, 0.1, 0.01, 8),
        breakdown=summary.breakdown | {VARIABILITY: 0.1},
    )
    assert set(keys(summary.to_dict())) == {entry.key for entry in METRICS if entry.key}


def test_every_entry_is_complete_and_has_its_own_name() -> None:
    assert len(set(metric_names())) == len(METRICS)
    for entry in METRICS:
        assert entry.definition.endswith("."), entry.name
        assert all((entry.formula, entry.unit, entry.source)), entry.name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("mfu", "MFU"),
        ("step_seconds", "step time"),
        ("OOM", "memory over"),
        ("Ψ", "Ψ"),
        ("psi", "Ψ"),
        ("busbw", "busbw"),
        ("bubble", "bubble"),
        ("memory_peak", "peak memory"),
        ("tokens/s/GPU", "tokens/s/GPU"),
    ],
)
def test_names_keys_and_other_names_are_found(typed: str, name: str) -> None:
    assert metric(typed).name == name


def test_explain_gives_definition_formula_unit_and_source() -> None:
    text = explain("busbw")
    assert "2(n − 1)/n for all-reduce" in text  # nccl-tests, doc/PERFORMANCE.md
    assert "B/s" in text
    assert "nccl-tests" in text


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="^unknown metric 'bubbel'; did you mean 'bubble'\\?$"):
        explain("bubbel")


def test_mfu_by_the_other_rule_is_told_where_attention_is_much_of_the_flops() -> None:
    """Llama-3.1 8B: half of attention's products, which a causal mask hides, are 1.5 % of the FLOPs at 2,048 tokens and 35 % at
    131,072: by hand 2 · 32 layers · 4096 features · sequence against 7.5e9 parameters in products.
    """
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"sequence": 131072, "data_parallel": "zero3"})
    summary = summarise(simulate(job))
    attention = 2 * 32 * 4096 * 131072
    left = 1 - attention / 2 / (attention + 7_504_658_432)  # 8,030,261,248 parameters without embedding and norms
    assert f"MFU is about {100 * summary.mfu * left:.1f} % when only what the causal mask leaves" in summary.notes[0]
    short = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"auto": False, "sequence": 2048})
    assert not any("mask" in note for note in summarise(simulate(short)).notes)
