"""Cutting blocks at their collectives, for cohorts whose collectives meet other traffic on the network."""

from __future__ import annotations

from dataclasses import replace

from sim.program import Block, Cohort, Collective, Kernel, Op, Program, Ref, Run, Send


def expand(program: Program, cohorts: set[int]) -> Program:
    """`program` with the blocks of `cohorts` cut at their collectives, so that these meet other traffic on the network."""
    cut = {number: _cut(cohort, number in cohorts) for number, cohort in enumerate(program.cohorts)}
    result = []
    for number, cohort in enumerate(program.cohorts):
        ops, last = cut[number]
        for op in ops:
            op.after = tuple(Ref(other, cut[other][1][position]) for other, position in op.after)
        steady = cohort.steady and (last[cohort.steady[0] - 1] + 1, last[cohort.steady[1] - 1] + 1)
        result.append(replace(cohort, ops=ops, steady=steady))
    return replace(program, cohorts=result)


def _cut(cohort: Cohort, blocks: bool) -> tuple[list[Op], list[int]]:
    """New ops, with their blocks cut if asked for; and for each old op the number of its last piece."""
    ops: list[Op] = []
    last: list[int] = []
    pieces: dict[int, list[Block | Collective]] = {}
    for op in cohort.ops:
        works: list[Block | Collective | Send] = [op.work]
        if blocks and isinstance(op.work, Block):
            if id(op.work) not in pieces:
                pieces[id(op.work)] = _pieces(op.work)
            works = list(pieces[id(op.work)])
        end = len(works) - 1
        for number, work in enumerate(works):
            after, taken = (op.after, op.allocate) if number == 0 else ((), ())
            ops.append(Op(op.stream, work, after, taken, op.free if number == end else (), op.microbatch, op.chunk))
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
