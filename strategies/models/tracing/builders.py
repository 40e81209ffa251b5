"""Where a module comes from: a function or class in a file of the user's, or an object of the user's program."""

from __future__ import annotations

import copy
import hashlib
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from strategies.models.tracing.hugging_face import class_of
from strategies.models.tracing.inputs import InputSpec, parse_inputs
from strategies.models.tracing.records import BUILDERS, Builder, Module
from topologies.reading import UserError, is_there, load_text, shown


def is_module_source(value: object) -> bool:
    """Whether a model is named as FILE.py:NAME."""
    file, colon, _ = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon) and file.endswith(".py")


def module_of(source: Any, given: Any, parallelize: Any = None) -> Module:
    """A module by FILE.py:NAME, by a function or class that makes it, or by itself; given: its inputs as text or sizes;
    parallelize: what cuts it over tp ranks, by name or itself.

    Nothing of the user's runs yet. Raises UserError.
    """
    if given is None:
        raise UserError(
            f"model {shown(source)}: needs the sizes of one sample: --input 3x224x224 (in a job: model: {{module, input}})"
        )
    if isinstance(given, str | int):
        inputs: tuple[InputSpec, ...] = parse_inputs(str(given))
    else:
        inputs = tuple(each if isinstance(each, InputSpec) else parse_inputs(str(each))[0] for each in given)
    cutting, digest = ("", "") if parallelize is None else _named(parallelize, "parallelize")
    name, own = _named(source, "model")
    return Module(source=name, input=inputs, digest=own + digest, parallelize=cutting)


def _named(source: Any, field: str) -> tuple[str, str]:
    """The name under which something callable is found again, and a digest of its file."""
    if not isinstance(source, str):
        return _remember(source), ""
    file, _, name = (source, "", "Config") if source.endswith(".json") else source.rpartition(":")
    if not (is_module_source(source) or source.endswith(".json")) or not name.isidentifier():
        what = "a module is named as FILE.py:NAME, a function or class that makes it"
        raise UserError(f"{field} {shown(source)}: {what if field == 'model' else 'is named as FILE.py:NAME, a function'}")
    if not is_there(Path(file), folder=False):
        raise UserError(f"{file}: cannot be read: no such file")
    return source, hashlib.sha256(load_text(Path(file)).encode()).hexdigest()[:16]


def _remember(source: Any) -> str:
    """The name under which what makes a module is found again: each call of a function of that name is another model."""
    name = getattr(source, "__name__", None) or type(source).__name__
    key = f"{name}, given from Python ({len(BUILDERS) + 1})"
    is_module = not isinstance(source, type) and hasattr(source, "named_parameters")
    BUILDERS[key] = (lambda: copy.deepcopy(source).to("meta")) if is_module else source
    return key


def builder_of(module: Module) -> Builder:
    """The function that makes the module; a file of the user's runs here. Raises UserError."""
    if module.source in BUILDERS:
        return BUILDERS[module.source]
    if module.source.endswith(".json"):
        return lambda: class_of(module.source)
    file, _, name = module.source.rpartition(":")
    path = Path(file).resolve()
    loader = SourceFileLoader(f"shardyard_user_{path.stem}", str(path))
    loaded = types.ModuleType(loader.name)
    loaded.__file__ = str(path)
    sys.path.insert(0, str(path.parent))  # what it imports lies beside it
    try:
        # not `exec_module`: bytecode is stale when a file changes within a second and keeps its length
        exec(loader.source_to_code(loader.get_data(str(path)), str(path)), loaded.__dict__)
    except Exception as error:
        raise UserError(f"{file}: failed while it was run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    builder = getattr(loaded, name, None)
    if not callable(builder):
        raise UserError(f"{file}: '{name}' is {'not there' if builder is None else 'no function or class'}")
    return builder if not hasattr(builder, "named_parameters") or isinstance(builder, type) else (lambda: builder)
