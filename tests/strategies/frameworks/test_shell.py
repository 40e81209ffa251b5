"""Arguments of commands in shell scripts, which are read and not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strategies.frameworks.shell import GROWTH, arguments
from topologies.reading import UserError


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def reading(text: str, name: str = "run.sh") -> dict[str, Any]:
        script = tmp_path / name
        script.write_text(text)
        return arguments(script)

    return reading


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("train --tp 2 --flag --name some --rate 0.5", {"tp": 2, "flag": True, "name": "some", "rate": "0.5"}),
        ("train --num_layers=12 --name=some", {"num-layers": 12, "name": "some"}),
        ("train --modules mlp moe 3", {"modules": ["mlp", "moe", 3]}),
        ("train --tp 2 \\\n  --pp 4", {"tp": 2, "pp": 4}),
        ("torchrun --nnodes 2 pretrain.py --tp 2", {"nnodes": 2, "tp": 2}),  # a script's name ends a list of values
        ("TP=2\ntrain --tp $TP --pp ${TP}", {"tp": 2, "pp": 2}),
        ("export TP=2\nPP=$TP\ntrain --pp $PP", {"pp": 2}),
        ("TP=${TP:-4}\ntrain --tp $TP", {"tp": 4}),
        ("train --tp ${TP:-8} --pp ${PP:=2}", {"tp": 8, "pp": 2}),
        ("GPUS=8\nNODES=4\ntrain --world $(($GPUS * $NODES)) --each $((GPUS/2)) --half $(( 8 / 3 ))", {"world": 32, "half": 2}),
        ("train --none $((8 / 0))", {"none": 8}),
        ('ARGS="--tp 2 --pp 4"\ntrain $ARGS', {"tp": 2, "pp": 4}),
        ("SIZES='--tp 2'\nMORE=\"$SIZES --pp 4\"\ntrain --flag $MORE", {"flag": True, "pp": 4}),
        ('TP="2"\nARGS="--tp $TP --pp 4" # degrees\ntrain ${ARGS}', {"tp": 2, "pp": 4}),
        ('ARGS="\n  --tp 2\n  --pp 4\n"\ntrain $ARGS --ep 8', {"tp": 2, "pp": 4, "ep": 8}),
        ("ARGS=(\n  --tp 2\n  --pp 4\n)\ntrain ${ARGS[@]}", {"tp": 2, "pp": 4}),
        ("ARGS+=(--sequence-parallel)\ntrain --tp 2", {"sequence-parallel": True, "tp": 2}),
        ("train --tp 2 # --tp 4", {"tp": 2}),
        ('train "--tp 2" --text "two words"', {"tp": 2, "text": "two words"}),
        ("train --unknown $NOWHERE", {"unknown": "$NOWHERE"}),
    ],
)
def test_flags_of_a_script(read: Any, text: str, flags: dict[str, Any]) -> None:
    settings = read(text)
    assert {name: settings.get(name) for name in flags} == flags


def test_a_list_of_arguments(read: Any) -> None:
    assert read("[--tp, 2, --flag, --rate, 0.5]", "run.yaml") == {"tp": 2, "flag": True, "rate": "0.5"}
    assert read('["--tp", "2"]', "run.json") == {"tp": 2}
    with pytest.raises(UserError, match="expected a list of arguments, found a mapping"):
        read("tp: 2", "run.yaml")


def test_what_is_no_shell_line_is_refused(read: Any) -> None:
    with pytest.raises(UserError, match="not a shell line"):
        read("train --name 'open")


def test_variables_that_grow_without_end_are_refused(read: Any) -> None:
    doubling = "\n".join(f"V{number}=${{V{number - 1}}}${{V{number - 1}}}" for number in range(1, 20))
    with pytest.raises(UserError, match=f"longer than {GROWTH:,} letters"):
        read(f"V0={'x' * 1000}\n{doubling}\n" + "train --name ${V19} " * 200)
