"""Cutting blocks at their collectives, for cohorts whose collectives meet other traffic on the network."""

from __future__ import annotations

from dataclasses import replace

from sim.program import Block, Cohort, Collective, Kernel, Op, Program, Ref, Run, Send


def expand(program: Program, cohorts: set[int]) -> Program:
    """`program` with the blocks of `cohorts` cut at their collectives, so that these meet other traffic on the network."""
    where = {number: _cut(program.cohorts[number]) for number in cohorts}
    result = []
    for number, cohort in enumerate(program.cohorts):
        ops = where[number][0] if number in cohorts else cohort.ops
        moved = [
            replace(op, after=tuple(Ref(c, where[c][1][o]) if c in cohorts else Ref(c, o) for c, o in op.after)) for op in ops
        ]
        steady = cohort.steady
        if steady and number in cohorts:
            steady = where[number][1][steady[0] - 1] + 1, where[number][1][steady[1] - 1] + 1
        result.append(replace(cohort, ops=moved, steady=steady))
    return replace(program, cohorts=result)


def _cut(cohort: Cohort) -> tuple[list[Op], list[int]]:
    """Ops with their blocks cut, and for each old op the number of its last piece."""
    ops: list[Op] = []
    last: list[int] = []
    pieces: dict[int, list[Block | Collective]] = {}
    for op in cohort.ops:
        works: list[Block | Collective | Send] = [op.work]
        if isinstance(op.work, Block):
            if id(op.work) not in pieces:
                pieces[id(op.work)] = _pieces(op.work)
            works = list(pieces[id(op.work)])
        for number, work in enumerate(works):
            first, end = number == 0, number == len(works) - 1
            ops.append(replace(op, work=work, after=op.after if first else (), allocate=op.allocate if first else (),
                               free=op.free if end else ()))  # fmt: skip
        last.append(len(ops) - 1)
    return ops, last


def _pieces(block: Block) -> list[Block | Collective]:
    """Kernels between collectives, and the collectives, in order."""
    result: list[Block | Collective] = []
    for times, items in block.runs:
        if not any(isinstance(item, Collective) for item in items):
            result.append(Block(block.name, (Run(times, items),)))
            continue
        once: list[Block | Collective] = []
        kernels: list[Kernel] = []
        for item in items:
            if isinstance(item, Collective):
                if kernels:
                    once.append(Block(block.name, (Run(1, tuple(kernels)),)))
                once.append(item)
                kernels = []
            else:
                kernels.append(item)
        if kernels:
            once.append(Block(block.name, (Run(1, tuple(kernels)),)))
        result += once * times
    return result
