"""Programs of plans (those that tests/data/refusals.jsonl does not refuse) are those that are kept in tests/data/programs.json.

A change that means to change what ranks do writes them anew: `python tests/test_programs.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from shardyard import UserError, read_job
from sim.program import Block, Collective, Kernel
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from tests.random_jobs import CPU, MODELS

DATA = Path(__file__).parent / "data"
KEPT = DATA / "programs.json"
PROGRAMS: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())


def plans() -> Iterator[str]:
    """Rows [model, GPUs of a node, whether nodes have CPUs, plan] of plans that are not refused."""
    for line in (DATA / "refusals.jsonl").read_text().splitlines():
        *row, refused = json.loads(line)
        if refused is None:
            yield json.dumps(row)


def program_of(row: str) -> dict[str, Any]:
    """Ops, FLOPs and bytes of kernels, bytes of collectives, and bytes at the beginning of all ranks' programs; a hash of every
    field of what layers cost and of every op, numbers to nine digits.
    """
    model, gpus, cpus, plan = json.loads(row)
    node = {"gpus": gpus, "nics": gpus} | ({"cpu": CPU} if cpus else {})
    fields = next(each for each in MODELS if each["name"] == model)
    job = read_job(None, {}, model=fields, nodes=2, plan={"auto": False} | plan, cluster={"based_on": "dgx-h100", "node": node})
    resolved = job.resolve()
    costs, program = parts(job.model, resolved), lower(job.model, resolved)
    works = [op.work for cohort in program.cohorts for op in cohort.ops]
    kernels = [(times, item) for work in works if isinstance(work, Block) for times, item in work.items()]
    texts = Texts()
    every = [costs.embedding, *costs.layers, costs.head, *program.cohorts]
    every.append(dataclasses.replace(program, cohorts=[]))
    return {
        "ops": len(works),
        "flops": sum(times * item.flops for times, item in kernels if isinstance(item, Kernel)),
        "bytes": sum(times * item.bytes for times, item in kernels if isinstance(item, Kernel)),
        "sent": sum(work.bytes * work.repeat for work in works if isinstance(work, Collective)),
        "resident": sum(size for cohort in program.cohorts for _, size in cohort.resident),
        "all": hashlib.sha256("\n".join(map(texts.of, every)).encode()).hexdigest()[:16],
    }


class Texts:
    """Every field of an object that is not at its default as a text; objects that are met again are written once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def of(self, value: Any) -> str:
        """The text of a value."""
        match value:
            case bool() | str() | None:
                return str(value)
            case int() | float():
                return f"{value:.9g}"
            case dict():
                return self.of([[key, each] for key, each in value.items()])
            case list() | tuple():
                return f"[{','.join(map(self.of, value))}]"
            case set() | frozenset():
                return self.of(sorted(value))
        if dataclasses.is_dataclass(value):
            if id(value) not in self._known:
                fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
                default = {field.name: field.default for field in dataclasses.fields(value)}
                text = ",".join(f"{name}={self.of(each)}" for name, each in fields.items() if each != default[name])
                self._known[id(value)] = value, f"({text})"
            return self._known[id(value)][1]
        return type(value).__name__


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: "")
def test_programs_are_those_that_are_kept(row: str) -> None:
    expected = {key: value if key == "all" else pytest.approx(value, rel=1e-9) for key, value in PROGRAMS[row].items()}
    assert program_of(row) == expected


if __name__ == "__main__":
    argparse.ArgumentParser(description=f"Write {KEPT.name} anew.").parse_args()
    kept = {}
    for plan in plans():
        with suppress(UserError):  # of what cannot be lowered
            kept[plan] = program_of(plan)
    lines = ",\n".join(f"{json.dumps(plan)}: {json.dumps(program)}" for plan, program in kept.items())
    KEPT.write_text(f"{{\n{lines}\n}}\n")
