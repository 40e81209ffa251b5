"""Blocks that are cut at their collectives: which ops result, what each waits for, and what it allocates, frees and holds up."""

from __future__ import annotations

from typing import Any

from sim.engine.blocks.splitting import expand
from sim.grid import Grid
from sim.program import COMPUTE, SIDE_STREAM, Block, Cohort, Collective, Item, Join, Kernel, Op, Program, Ref, Run, Send, Start

SUM = Collective("all_reduce", 8.0, "tp", "sum")
OTHER = Collective("all_gather", 8.0, "tp", "other")
AWAY = "elsewhere"
Row = tuple[str, str, tuple[tuple[int, int], ...]]  # of an op: stream, labels of what it does, what it waits for


def kernel(label: str) -> Kernel:
    return Kernel("memory", label, "forward", 0.0, 1.0)


A, B, C = map(kernel, "abc")


def block(*items: Item, times: int = 1) -> Block:
    return Block("forward", (Run(times, items),))


def split(*ops: Op, other: tuple[Op, ...] = (), cohorts: tuple[int, ...] = (0,), **fields: Any) -> list[Cohort]:
    program = Program(Grid.of(pp=2, tp=2), [Cohort({}, list(ops), **fields), Cohort({}, list(other))], 1, 1, "bf16", 1, 1)
    return expand(program, set(cohorts)).cohorts


def rows(cohort: Cohort) -> list[Row]:
    """Kernels of a block are its letters, with how often its run repeats them."""
    result = []
    for op in cohort.ops:
        if isinstance(op.work, Block):
            what = " ".join("".join(getattr(item, "label", "") for item in run.items) * run.times for run in op.work.runs)
        else:
            what = op.work.label
        result.append((op.stream, what, tuple(map(tuple, op.after))))
    return result


def test_a_block_is_cut_at_each_collective() -> None:
    """Two layers of two kernels, a sum and a kernel: kernels on both sides of a layer's end are not joined."""
    (cohort, _) = split(Op(COMPUTE, block(A, B, SUM, C, times=2)))
    assert [what for _, what, _ in rows(cohort)] == ["ab", "sum", "c", "ab", "sum", "c"]
    assert {stream for stream, _, _ in rows(cohort)} == {COMPUTE}
    assert not any(op.after for op in cohort.ops)  # the order of the stream is enough


def test_a_run_without_collectives_stays_whole() -> None:
    (cohort, _) = split(Op(COMPUTE, Block("forward", (Run(3, (A, B)), Run(2, (SUM,)), Run(1, (C,))))))
    assert [what for _, what, _ in rows(cohort)] == ["ababab", "sum", "sum", "c"]


def test_a_collective_beside_waits_for_what_was_launched_before_and_its_join_for_it() -> None:
    (cohort, _) = split(Op(COMPUTE, block(A, Start(SUM), B, Join(SUM), C)))
    beside = [(0, 0)]
    assert rows(cohort) == [
        (COMPUTE, "a", ()),
        (SIDE_STREAM, "sum", tuple(beside)),
        (COMPUTE, "b", ()),
        (COMPUTE, "c", ((0, 1),)),
    ]


def test_a_block_that_begins_with_a_start_and_ends_with_a_join_has_empty_ops_at_its_ends() -> None:
    """The start waits for the empty op, which waits for what the block waits for; the join holds up the empty op at the end."""
    first = Op(COMPUTE, block(A))
    (cohort, _) = split(first, Op(COMPUTE, block(Start(SUM), B, Join(SUM)), (Ref(0, 0),)))
    assert rows(cohort) == [
        (COMPUTE, "a", ()),
        (COMPUTE, "", ((0, 0),)),
        (SIDE_STREAM, "sum", ((0, 1),)),
        (COMPUTE, "b", ()),
        (COMPUTE, "", ((0, 2),)),
    ]


def test_a_join_is_of_the_oldest_start() -> None:
    (cohort, _) = split(Op(COMPUTE, block(A, Start(SUM), Start(SUM), B, Join(SUM), C, Join(SUM), A)))
    assert rows(cohort)[1:] == [
        (SIDE_STREAM, "sum", ((0, 0),)),
        (SIDE_STREAM, "sum", ((0, 0),)),
        (COMPUTE, "b", ()),
        (COMPUTE, "c", ((0, 1),)),
        (COMPUTE, "a", ((0, 2),)),
    ]


def test_joins_in_a_row_are_all_waited_for() -> None:
    (cohort, _) = split(Op(COMPUTE, block(A, Start(SUM), Start(OTHER), B, Join(OTHER), Join(SUM), C)))
    assert rows(cohort)[-1] == (COMPUTE, "c", ((0, 2), (0, 1)))


def test_a_collective_that_kernels_wait_for_comes_after_the_latest_one_beside() -> None:
    """One communicator runs its collectives in order. One on a stream of its own is not waited for, nor is one twice."""
    (cohort, _) = split(Op(COMPUTE, block(A, Start(SUM), Start(SUM), B, OTHER, C, Join(SUM), Join(SUM), A)))
    assert rows(cohort)[4] == (COMPUTE, "other", ((0, 2),))
    (cohort, _) = split(Op(COMPUTE, block(A, Start(SUM, AWAY), B, OTHER, Join(SUM), C)))
    assert rows(cohort)[1:4] == [(AWAY, "sum", ((0, 0),)), (COMPUTE, "b", ()), (COMPUTE, "other", ())]
    (cohort, _) = split(Op(COMPUTE, block(A, Start(SUM), B, Join(SUM), OTHER)))
    assert rows(cohort)[3] == (COMPUTE, "other", ((0, 1),))


def test_what_a_block_waits_for_and_takes_is_of_its_first_piece_and_what_it_frees_of_its_last() -> None:
    allocated, freed = (("activation", 3.0),), (("temporary", 2.0),)
    ops = (
        Op("pp", Send(1.0, 1, "send")),
        Op(COMPUTE, block(A, SUM, B), (Ref(0, 0),), allocated, freed, microbatch=4, chunk=1, held=True),
        Op("pp", Send(1.0, 1, "send"), (Ref(0, 1),)),
    )
    (cohort, _) = split(*ops)
    assert [tuple(map(tuple, op.after)) for op in cohort.ops] == [(), ((0, 0),), (), (), ((0, 3),)]
    first, middle, last = cohort.ops[1:4]
    assert (first.allocate, first.free, first.held) == (allocated, (), True)
    assert (middle.allocate, middle.free, middle.held) == ((), (), False)
    assert (last.allocate, last.free, last.held) == ((), freed, False)
    assert {(op.microbatch, op.chunk) for op in (first, middle, last)} == {(4, 1)}


def test_a_block_of_one_piece_both_takes_and_frees() -> None:
    allocated, freed = (("activation", 3.0),), (("temporary", 2.0),)
    (cohort, _) = split(Op(COMPUTE, block(A, B), (), allocated, freed, held=True))
    (op,) = cohort.ops
    assert (op.allocate, op.free, op.held) == (allocated, freed, True)


def test_collectives_beside_have_the_microbatch_and_chunk_of_their_block() -> None:
    (cohort, _) = split(Op(COMPUTE, block(A, Start(SUM), B, Join(SUM), C), microbatch=4, chunk=1))
    assert {(op.microbatch, op.chunk) for op in cohort.ops} == {(4, 1)}


def test_only_the_cohorts_that_are_asked_for_are_cut_and_references_to_them_follow() -> None:
    """The other cohort's op waits for the end of the first's block, which has three pieces."""
    ops = (Op(COMPUTE, block(A, SUM, B)), Op(COMPUTE, block(C), (Ref(1, 1),)))
    waiting = (Op(COMPUTE, block(A, SUM, B), (Ref(0, 0),)), Op("pp", Send(1.0, 0, "send"), (Ref(1, 0), Ref(0, 1))))
    first, second = split(*ops, other=waiting)
    assert [len(op.work.runs) for op in second.ops if isinstance(op.work, Block)] == [1]
    assert len(second.ops) == 2
    assert [tuple(map(tuple, op.after)) for op in second.ops] == [((0, 2),), ((1, 0), (0, 3))]
    assert [tuple(map(tuple, op.after)) for op in first.ops] == [(), (), (), ((1, 1),)]
    _, both = split(*ops, other=waiting, cohorts=(0, 1))
    assert [tuple(map(tuple, op.after)) for op in both.ops] == [((0, 2),), (), (), ((1, 2), (0, 3))]


def test_the_steady_part_begins_and_ends_with_the_same_blocks() -> None:
    """Ops 1 and 2 of three, of 3 pieces each: pieces 3 … 8."""
    (cohort, _) = split(*(Op(COMPUTE, block(A, SUM, B)) for _ in range(3)), steady=(1, 3))
    assert cohort.steady == (3, 9)
    (cohort, _) = split(*(Op(COMPUTE, block(A, SUM, B)) for _ in range(3)), steady=(2, 3))
    assert cohort.steady == (6, 9)


def test_the_given_program_is_left_as_it_is() -> None:
    ops = [Op(COMPUTE, block(A, SUM, B)), Op("pp", Send(1.0, 1, "send"), (Ref(0, 0),))]
    split(*ops)
    assert ops[1].after == (Ref(0, 0),)
