"""Broken inputs of every kind, made from good ones by a seeded generator: each is read, or refused with one printable line.

Files are changed in two ways: values anywhere in their data are replaced by odd ones, and their bytes are cut, repeated, swapped
or replaced. A seed always makes the same inputs, so that what a run finds another run finds, too.
"""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from calibration.readers.kineto import read_traces
from calibration.readers.nccl_tests import read_nccl_tests
from calibration.samples import merge, read_journal
from calibration.validation_set import SHIPPED, read_set
from sim.pricing.shipped import load_profile
from strategies.planner.multiples import absolute
from strategies.planner.search.results import Results
from strategies.planner.search.space import load_space, parse_axis
from strategies.read_job import read_job
from topologies.cluster_files import load_cluster
from topologies.documents.errors import LONGEST
from topologies.reading import UserError, load_yaml

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/data"
INPUTS = 40  # of each kind
SMALL = {"name": "small", "hidden": 512, "layers": 8, "heads": 8, "vocabulary": 1000, "context": 512}
NUMBERS = [None, True, 0, 1, 3, -1, 0.5, -0.0, 1e-300, 1e308, 10**9, 10**20, 10**100, 2**63]
LISTS = [[], [1], [None], [[1]], [8] * 80, {}, {"a": 1}, {"": 1}, {"based_on": "dgx-h100"}]
QUANTITIES = ["0 GB/s", "-1 GB/s", "400 Gb/s", "1 B", "1 us", "1 PB"]
STRANGE = ["", " ", "²", "٣", "../../etc/passwd", "/dev/null", "é" * 300, "x" * 300 + ".yaml", "<script>", "\u202e", "\u2028"]
WORDS = "x 8 1e3 nan -inf 2001-13-45 h100-sxm zero3 interleaved 1f1b full auto tp-cp-ep-dp-pp graph torus".split()
VALUES: list[Any] = NUMBERS + LISTS + QUANTITIES + STRANGE + WORDS
TAGS = ["!!int x", "!!python/name:os.system", "&a [*a]", "*a", "<<: x", "? [a]\n: b", "[" * 200]
LETTERS = ["\x00", "\x1b[31m", "\ufeff", "\u2028", '"\\0"', '"\\ud800"', "²", "🦄", "{", "]", "-", "'", "\r\n", "\t", ": ", ",,"]
TEXTS = [*TAGS, *LETTERS, "9" * 5000, "1e999", ".inf", ".nan", "2001-13-45"]
BYTES = [text.encode() for text in TEXTS] + [b"\xff\xfe", b"\x80", b"%YAML 9.9\n---\n"]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places(data[key])


def odd(chance: random.Random, data: Any) -> Any:
    """The data with some values replaced, removed, doubled or moved."""
    data = copy.deepcopy(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        known = list(places(data))
        if not known:
            return chance.choice(VALUES)
        container, key = chance.choice(known)
        how, old = chance.random(), container[key]
        if how < 0.6:
            container[key] = copy.deepcopy(chance.choice(VALUES))
        elif how < 0.7:
            del container[key]
        elif how < 0.8:
            container[key] = chance.choice(([old], {"x": old}, str(old)))
        elif how < 0.9 and isinstance(old, int | float) and not isinstance(old, bool):
            container[key] = chance.choice((-old, old * 1000, old + 1, old / 3, float(old)))
        elif isinstance(container, dict):
            container[str(chance.choice(VALUES))[:60]] = copy.deepcopy(old)
    return data


def broken(chance: random.Random, content: bytes) -> bytes:
    """The content with some of its bytes changed."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randint(0, len(content))
        end = min(len(content), at + chance.choice((1, 5, 50)))
        lines = content.split(b"\n")
        line = chance.randrange(len(lines))
        content = chance.choice(
            (
                content[:at] + content[end:],
                content[:at],
                content[:at] + chance.choice(BYTES) + content[at:],
                content[:at] + content[at:end] * 3 + content[end:],
                content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :],
                b"\n".join(lines[:line] + lines[line + 1 :]),
                b"\n".join([*lines, lines[line]]),
            )
        )
    return content


Read = Callable[[Path], Any]


def job_of(**given: Any) -> None:
    read_job(**{"model": SMALL, "cluster": "dgx-h100", "plan": {}} | given).resolve()


def result_of(path: Path) -> None:
    Results(str(path))


def settings(name: str) -> Read:
    return lambda path: job_of(**{f"from_{name}": str(path)}, **({"model": None} if name == "megatron" else {}))


TRACE = {
    "distributedInfo": {"rank": 0, "pg_config": [{"pg_name": "default_pg", "ranks": [0, 1]}]},
    "traceEvents": [
        {
            "cat": "kernel",
            "name": "ncclDevKernel_x",
            "ts": float(at),
            "dur": 40.0,
            "args": {
                "Collective name": "allreduce",
                "In msg nelems": 2**at,
                "Out msg nelems": 2**at,
                "Group size": 2,
                "dtype": "BFloat16",
                "Process Group Name": "default_pg",
                "Process Group Ranks": "[0, 1]",
            },
        }
        for at in range(8, 14)
    ],
}
LOG = {
    "args": ["all_reduce_perf"],
    "devices": [{"rank": rank, "hostname": "a", "device_info": "H100"} for rank in range(2)],
    "results": [{"size": 2**at, "out_of_place": {"time": 1.0 * at, "nwrong": 0}, "in_place": {"time": 9.0}} for at in (8, 9)],
}
HEAD = {"format": 1, "device": "cpu", "ranks": 2, "machine": "m", "versions": "v"}
CASE = {"operation": "all_reduce", "ranks": 2, "nodes": 1, "bytes": 1024}
SAMPLES = [HEAD, *({"part": "collective", "case": CASE, "value": 1e-5 * visit, "round": visit} for visit in range(1, 4))]
ROW = {
    "hash": "0" * 12,
    "version": "v",
    "changes": {"plan.tp": 2},
    "step": 1.0,
    "error": None,
    "fits": True,
    "memory": 1e9,
    "mfu": 0.4,
    "gpus": 8,
    "tokens_per_second": 8.0,
    "tokens_per_second_per_gpu": 1.0,
    "bubble": 0.1,
    "exposed": 0.1,
}
SPACE = {"plan.tp": [1, 2], "plan.schedule": ["1f1b", {"plan.schedule": "interleaved", "plan.chunks": 2}], "nodes": [1, 2]}


def lines(rows: Any) -> bytes:
    """A line of JSON for each."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def table(rows: Any) -> bytes:
    """CSV as a search leaves it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ROW), extrasaction="ignore")
    writer.writeheader()
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict):
            writer.writerow({key: json.dumps(value) if key == "changes" else value for key, value in row.items()})
    return text.getvalue().encode("utf-8", "replace")


def shipped(*patterns: str) -> list[Any]:
    """The data in files."""
    return [load_yaml(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def texts(*patterns: str) -> list[bytes]:
    """The bytes in files."""
    return [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def as_yaml(data: Any) -> bytes:
    return yaml.safe_dump(data, allow_unicode=True).encode()


def as_json(data: Any) -> bytes:
    return json.dumps(data).encode()


# kind -> (name of the file, good data, how they are written, good bytes, what reads them)
KINDS: dict[str, tuple[str, Callable[[], list[Any]], Callable[[Any], bytes], Callable[[], list[bytes]], Read]] = {
    "job": (
        "j.yaml",
        lambda: shipped("examples/*.yaml"),
        as_yaml,
        lambda: texts("examples/*.yaml"),
        lambda path: read_job(str(path)).resolve(),
    ),
    "cluster": (
        "c.yaml",
        lambda: shipped("examples/clusters/*.yaml"),
        as_yaml,
        lambda: texts("examples/clusters/*.yaml"),
        lambda path: load_cluster(str(path)).topology(),
    ),
    "model": (
        "m.yaml",
        lambda: shipped("strategies/models/presets/*.yaml"),
        as_yaml,
        lambda: texts("strategies/models/presets/*.yaml"),
        lambda path: job_of(model=str(path)),
    ),
    "config.json": (
        "config.json",
        lambda: shipped("tests/data/models/*.json"),
        as_json,
        lambda: texts("tests/data/models/*.json"),
        lambda path: job_of(model=str(path), plan={}),  # of "model" a plan is looked for
    ),
    "deepspeed": (
        "d.json",
        lambda: shipped("tests/data/frameworks/*.json"),
        as_json,
        lambda: texts("tests/data/frameworks/*.json"),
        settings("deepspeed"),
    ),
    "accelerate": (
        "a.yaml",
        lambda: shipped("tests/data/frameworks/*.yaml"),
        as_yaml,
        lambda: texts("tests/data/frameworks/*.yaml"),
        settings("accelerate"),
    ),
    "torchtitan": ("t.toml", list, as_yaml, lambda: texts("tests/data/frameworks/*.toml"), settings("torchtitan")),
    "megatron": ("m.sh", list, as_yaml, lambda: texts("tests/data/frameworks/*.sh"), settings("megatron")),
    "dump": (
        "dump.txt",
        list,
        as_yaml,
        lambda: texts("tests/data/topologies/*"),
        lambda path: load_cluster(str(path), overrides={"node.gpu": "a100-sxm-80gb"}),
    ),
    "profile": (
        "p.yaml",
        lambda: shipped("sim/pricing/profiles/h100.yaml"),
        as_json,
        lambda: texts("sim/pricing/profiles/v100.yaml"),
        load_profile,
    ),
    "trace": (
        "t.json",
        lambda: [TRACE],
        as_json,
        lambda: [as_json(TRACE), gzip.compress(as_json(TRACE))],
        lambda path: read_traces([path], 8),
    ),
    "log": ("all_reduce.json", lambda: [LOG], as_json, lambda: texts("tests/data/nccl/*.log"), read_nccl_tests),
    "schedule": (
        "s.csv",
        list,
        as_yaml,
        lambda: texts("tests/data/own_schedule.csv", "examples/zb-v.csv"),
        lambda path: job_of(plan={"schedule": str(path), "pp": 2}),
    ),
    "journal": ("s.jsonl", lambda: [SAMPLES], lines, lambda: [lines(SAMPLES)], lambda path: merge(read_journal(path)[1])),
    "rows": ("r.jsonl", lambda: [[ROW, ROW | {"hash": "1" * 12}]], lines, lambda: [lines([ROW, ROW])], result_of),
    "table": ("r.csv", lambda: [[ROW, ROW | {"hash": "1" * 12}]], table, lambda: [table([ROW, ROW])], result_of),
    "space": ("space.yaml", lambda: [SPACE], as_yaml, lambda: [as_yaml(SPACE)], lambda path: list(load_space(str(path)).sites())),
    "set": (
        "v.yaml",
        lambda: [load_yaml(SHIPPED)],
        as_yaml,
        lambda: [SHIPPED.read_bytes()],
        lambda path: read_set(str(path), ()),
    ),
}


def refusal(read: Callable[[], Any]) -> str:
    """The line that an input is refused with; "" when it is read. Anything but a UserError is raised."""
    try:
        read()
    except UserError as error:
        return str(error)
    return ""


def check(text: str) -> None:
    assert not text or text.isprintable()
    assert len(text) <= LONGEST + 3


@pytest.mark.parametrize("kind", KINDS)
def test_broken_files_are_read_or_refused_with_one_line(kind: str, tmp_path: Path) -> None:
    name, good, written, raw, read = KINDS[kind]
    chance, data, contents = random.Random(f"files {kind}"), good(), raw()
    (file := tmp_path / name).write_bytes(contents[0])
    refused = 0
    for number in range(INPUTS):
        values = data and number % 2
        file.write_bytes(written(odd(chance, chance.choice(data))) if values else broken(chance, chance.choice(contents)))
        text = refusal(lambda: read(file))
        check(text)
        refused += bool(text)
    assert refused  # otherwise nothing was broken


FIELDS = """
    plan.tp plan.schedule plan.offload plan.fp8 plan.bucket plan.layers_per_stage plan plan..tp model model.layers model.experts
    cluster cluster.node.nic cluster.node.gpu cluster.fabric cluster.node.edges cluster.node.gpu.peak.bf16 nodes profile name
    price
""".split()
FIELDS.append("")


def test_broken_options_are_read_or_refused_with_one_line() -> None:
    chance = random.Random("options")
    job = read_job(model=SMALL, cluster="dgx-h100", plan={})
    refused = 0
    for _ in range(6 * INPUTS):
        value = chance.choice((chance.choice(TEXTS), json.dumps(chance.choice(VALUES)), json.dumps(odd(chance, SPACE))))
        option = f"{chance.choice(FIELDS)}={value}"
        for read in (
            lambda option=option: read_job(None, [option], model=SMALL, cluster="dgx-h100", plan={}).resolve(),
            lambda option=option: absolute(parse_axis(option), job),
        ):
            text = refusal(read)
            check(text)
            refused += bool(text)
    assert refused
