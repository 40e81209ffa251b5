"""Chakra execution traces: read back by the schema, and replayed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports.chakra import write_chakra
from sim.analysis.summary import summarise
from strategies.predict import simulate
from strategies.read_job import read_job
from topologies.reading import UserError

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel": "ddp", "accumulation": 2},
    "zero3": {"data_parallel": "zero3", "accumulation": 2},
    "tensor": {"tp": 4, "sequence_parallel": True, "data_parallel": "zero1", "accumulation": 1},
    "pipeline": {"pp": 4, "tp": 2, "accumulation": 4},
}
COMP, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
Node = dict[str, Any]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message: numbers of wire type 0, bytes of wire type 2; no other is expected."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        number, wire = divmod(varint(), 8)
        assert wire in (0, 2)
        value: Any = varint()
        if wire == 2:
            at, value = at + value, data[at : at + value]
        yield number, value


def messages(data: bytes) -> list[bytes]:
    """Messages behind each other, each with its length before it: what fields of wire type 2 look like without their tag."""
    result, at = [], 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            at, size, shift = at + 1, size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        result.append(data[at : at + size])
        at += size
    return result


def nodes(path: Path) -> list[Node]:
    """The nodes of a trace by the names of et_def.proto."""
    about, *rest = messages(path.read_bytes())
    assert dict(fields(about)) == {1: b"0.0.4"}
    result = []
    for message in rest:
        node: Node = {"data_deps": [], "attr": {}}
        for number, value in fields(message):
            if number == 5:
                node["data_deps"] = _packed(value)
            elif number == 10:
                attribute = dict(fields(value))
                name, (kind,) = attribute.pop(1).decode(), tuple(attribute)
                assert kind == {"is_cpu_op": 27, "pg_name": 29, "comm_size": 13, "tensor_size": 13}.get(name, 9)
                node["attr"][name] = attribute[kind]
            else:
                node[{1: "id", 2: "name", 3: "type", 6: "start_time_micros", 7: "duration_micros"}[number]] = value
        result.append(node)
    return result


def _packed(data: bytes) -> list[int]:
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    return values


def replayed(traces: dict[int, list[Node]], groups: dict[str, list[int]]) -> float:
    """Seconds until the last node of all ranks has ended. Nodes start after what they depend on, collectives after all."""
    ends: dict[int, dict[int, float]] = {rank: {} for rank in traces}
    at = dict.fromkeys(traces, 0)
    sent: dict[tuple[int, int, int], float] = {}
    met: dict[tuple[str, int], dict[int, tuple[int, float, float]]] = defaultdict(dict)
    met_by: dict[tuple[int, str], int] = defaultdict(int)
    moving = True
    while moving:
        moving = False
        for rank, trace in traces.items():
            while at[rank] < len(trace):
                node = trace[at[rank]]
                if any(each not in ends[rank] for each in node["data_deps"]):
                    break  # waits for a collective that others have not come to
                ready = max((ends[rank][each] for each in node["data_deps"]), default=0.0)
                attr, seconds = node["attr"], node["duration_micros"] / 1e6
                if node["type"] == RECEIVE:
                    key = attr["comm_src"], attr["comm_dst"], attr["comm_tag"]
                    if key not in sent:
                        break
                    ends[rank][node["id"]] = sent[key]
                elif node["type"] == COLLECTIVE:
                    group = attr["pg_name"].decode()
                    turn = met_by[rank, group]
                    met_by[rank, group] += 1
                    members = met[group, turn]
                    members[rank] = node["id"], ready, seconds
                    if len(members) == len(groups[group]):
                        end = max(r for _, r, _ in members.values()) + min(s for *_, s in members.values())
                        for member, (own, *_) in members.items():
                            ends[member][own] = end
                else:
                    ends[rank][node["id"]] = ready + seconds
                    if node["type"] == SEND:
                        sent[attr["comm_src"], attr["comm_dst"], attr["comm_tag"]] = ready + seconds
                at[rank] += 1
                moving = True
    assert all(at[rank] == len(trace) for rank, trace in traces.items()), "a deadlock"
    return max(max(of_rank.values()) for of_rank in ends.values())


@pytest.mark.parametrize("name", PLANS)
def test_a_replay_takes_as_long_and_moves_as_much(name: str, tmp_path: Path) -> None:
    """Of every rank: the step to 1 %, the bytes that its collectives and sends move, to the byte."""
    small = ["model.layers=4"]
    timeline = simulate(
        read_job(overrides=small, model="llama-3.1-8b", cluster="dgx-a100", nodes=2, plan={"sequence": 2048, **PLANS[name]}),
        fold=False,
    )
    *paths, listed = write_chakra(timeline, tmp_path)
    groups = json.loads(listed.read_text())
    traces = {int(path.suffixes[0][1:]): nodes(path) for path in paths}
    assert sorted(traces) == list(range(16))
    assert replayed(traces, groups) == pytest.approx(timeline.step, rel=0.01)
    sent = 0.0
    for node in (node for trace in traces.values() for node in trace):
        attr = node["attr"]
        if node["type"] == SEND:
            sent += attr["comm_size"]
        elif node["type"] == COLLECTIVE:
            n = len(groups[attr["pg_name"].decode()])
            sent += attr["comm_size"] * {0: 2 * (n - 1) / n, 2: n - 1, 7: (n - 1) / n}[attr["comm_type"]]
    total = summarise(timeline, total=True).total
    assert total is not None
    assert sent == pytest.approx(sum(each.bytes for each in total.values()), rel=1e-6)


def test_mlcommons_own_classes_read_what_is_written(tmp_path: Path) -> None:
    """The same nodes, in the types of the published schema, nothing left over that it does not know."""
    schema = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs pip install mlc-chakra")
    from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd
    from google.protobuf.unknown_fields import UnknownFieldSet

    job = read_job(
        overrides=["model.layers=4"], model="llama-3.1-8b", cluster="dgx-a100", plan={"sequence": 2048, **PLANS["pipeline"]}
    )
    *paths, _ = write_chakra(simulate(job, fold=False), tmp_path)
    for path in paths:
        with openFileRd(str(path)) as file:
            about, node, read = schema.GlobalMetadata(), schema.Node(), []
            assert decodeMessage(file, about)
            assert about.version == "0.0.4"
            while decodeMessage(file, node):
                assert not UnknownFieldSet(node)
                attr = {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}
                read.append((node.id, node.name, node.type, list(node.data_deps), node.duration_micros, attr))
        assert read == [
            (
                each["id"],
                each["name"].decode(),
                each["type"],
                each["data_deps"],
                each.get("duration_micros", 0),
                {name: value.decode() if isinstance(value, bytes) else value for name, value in each["attr"].items()},
            )
            for each in nodes(path)
        ]
    assert {number for _, _, number, *_ in read} == {
        schema.COMP_NODE,
        schema.COMM_SEND_NODE,
        schema.COMM_RECV_NODE,
        schema.COMM_COLL_NODE,
    }


def test_too_many_nodes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.chakra.MOST", 100)
    timeline = simulate(read_job(model="gpt2-1.5b", cluster="dgx-a100", plan={"auto": False, "sequence": 1024}), fold=False)
    with pytest.raises(UserError, match="more than 100 nodes"):
        write_chakra(timeline, tmp_path)
