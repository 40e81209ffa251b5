"""Settings of frameworks as they are read: a file of each, with one value changed or left out."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from strategies.frameworks.export import export
from strategies.frameworks.settings import frameworks
from tests.results.jobs import random_question_job
from tests.results.questions import question
from topologies.reading import UserError

FILES = Path(__file__).parent.parent / "data" / "frameworks"
SAMPLES = {"accelerate": "fsdp.yaml", "deepspeed": "ds_config.json", "megatron": "gpt3_175b.sh", "torchtitan": "train.toml"}
DRAWN = 8  # jobs whose settings say what the sample does not
BASES = 4  # settings that are changed
VALUES: list[Any] = [True, False, 0, 2, 3, 1.5, "auto", "none", "full", "selective", None]
Place = tuple[str, ...]


@question
def reading(name: str) -> Any:
    """What settings say, and by each of their values, what others change: fields, and a hash of what to."""
    draw, texts = random.Random(name), [(FILES / SAMPLES[name]).read_text()]
    while len(texts) <= DRAWN:
        with suppress(UserError):
            texts.append(export(name, random_question_job(draw, nodes=1)).text)
    result: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        file = Path(folder, SAMPLES[name])
        for number, base in enumerate(texts[:BASES]):
            usual = _read(name, file, base)
            result[f"{number}"] = str(usual)
            for where, variants in _variants(file.suffix, base, texts):
                changed, digest = list[str](), hashlib.sha256()
                for each in variants:
                    read = _read(name, file, each)
                    fields = sorted(field for field in read | usual if read.get(field) != usual.get(field))
                    changed.append("refused" if "refused" in read else " ".join(fields) or "-")
                    digest.update(str(sorted(read.items())).encode())
                texts_of = [f"{text} ×{len(list(same))}" for text, same in groupby(changed)]
                result[f"{number} {where}"] = f"{', '.join(texts_of)} {digest.hexdigest()[:8]}"
    return result


def _read(name: str, file: Path, text: str) -> dict[str, Any]:
    file.write_text(text)
    try:
        settings = frameworks[name].read(file)
    except UserError as error:
        return {"refused": str(error).replace(str(file), "FILE")}
    numbers = {"nodes": settings.nodes, "gpus": settings.gpus}
    said = {"ignored": settings.ignored, "remarks": settings.remarks}
    return settings.plan | {f"model {key}": value for key, value in settings.model.items()} | numbers | said


def _variants(suffix: str, text: str, texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """By place, the text with other values there; of places that others have, too."""
    if suffix == ".sh":
        flags = dict.fromkeys(flag for each in texts for flag in re.findall(r"(?<=[\s(])--[a-z][\w-]*", each))
        for flag in flags:
            without = re.sub(rf"{flag}(?![\w-])([ =][^-\s\\)][^\s\\)]*)?", "", text)
            yield (
                flag,
                [without, *(without.replace("--seq-length", f"{flag} {each} --seq-length", 1) for each in ("", 1, 2, 0.5))],
            )
        return
    parse = {".json": json.loads, ".yaml": yaml.safe_load, ".toml": tomllib.loads}[suffix]
    for path in dict.fromkeys(path for each in texts for path in _leaves(parse(each), ())):
        yield ".".join(path), [_written(suffix, _changed(parse(text), path, value)) for value in VALUES]


def _leaves(data: Any, path: Place) -> Iterator[Place]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path


def _changed(data: Any, path: Place, value: Any) -> Any:
    if not path:
        return value
    inner = data.get(path[0], {}) if isinstance(data, dict) else {}
    changed = {**(data if isinstance(data, dict) else {}), path[0]: _changed(inner, path[1:], value)}
    return {key: each for key, each in changed.items() if each is not None}


def _written(suffix: str, data: dict[str, Any]) -> str:
    if suffix != ".toml":
        return json.dumps(data)  # which is YAML, too
    return "\n".join(_table(data, ()))


def _table(data: dict[str, Any], path: Place) -> Iterator[str]:
    if path:
        yield f"[{'.'.join(path)}]"
    yield from (f"{key} = {json.dumps(value)}" for key, value in data.items() if not isinstance(value, dict))
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _table(value, (*path, key))
