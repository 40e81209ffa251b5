"""The page of the Python API: every public name, its signature and its documentation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from reports.figures import figures
from reports.reference.markdown import code, plain, sentence, table

_HEAD = """# Python

`import shardyard` gives these names; [From Python](../commands.md#from-python) has examples. What a command does is the function
of its name. Jobs are made by `read_job`, or said as a file's name or a mapping of fields wherever `job` stands below.
"""


def api_page(module: ModuleType) -> str:
    """The public names of a module: functions, then classes with their public members, then figures."""
    functions, classes = [], []
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            classes.append((name, thing))
        elif inspect.isfunction(thing):
            functions.append((name, thing))
    parts = [_HEAD, table(("function", ""), [(f"[`{name}`](#{name})", _first(thing)) for name, thing in functions])]
    parts += [_entry(name, thing) for name, thing in functions]
    for name, kind in classes:
        parts += [f"## {name}\n", _documentation(kind), *_members(kind)]
    parts += ["## figures\n", '`figures.NAME(data)` draws, `figures.NAME(data, "file.png")` saves.\n']
    parts.append(table(("figure", ""), [(code(name), _first(figures[name].draw)) for name in figures]))
    return "\n".join(parts)


def _entry(name: str, function: Any) -> str:
    return f"## {name}\n\n```python\n{name}{_signature(function)}\n```\n\n{_documentation(function)}\n"


def _signature(function: Any) -> str:
    """With each parameter on a line of its own where there are many."""
    signature = inspect.signature(function)
    short = str(signature).replace("'", "")
    if len(short) <= 100:
        return short
    body = short[1 : short.rindex(")")]
    lines, depth, line = [], 0, ""
    for letter in body:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            lines.append(f"    {line.strip()},")
            line = ""
        else:
            line += letter
    lines.append(f"    {line.strip()},")
    return "(\n" + "\n".join(lines) + "\n" + short[short.rindex(")") :]


def _members(kind: type) -> Iterator[str]:
    rows = []
    for name, member in inspect.getmembers_static(kind):
        if name.startswith("_") or not getattr(inspect.unwrap(getattr(member, "func", member)), "__doc__", None):
            continue
        if not str(getattr(inspect.getmodule(getattr(member, "fget", None) or getattr(member, "func", member)), "__name__", "")):
            continue
        if isinstance(member, (property,)) or hasattr(member, "func"):
            rows.append((code(name), _first(member)))
        elif inspect.isfunction(member):
            rows.append((code(f"{name}{_short(member)}"), _first(member)))
    if rows:
        yield "\n" + table(("member", ""), rows)


def _short(function: Any) -> str:
    return "(" + ", ".join(name for name in inspect.signature(function).parameters if name != "self") + ")"


def _documentation(thing: Any) -> str:
    return "\n\n".join(plain(sentence(part)) for part in (inspect.getdoc(thing) or "").split("\n\n")) + "\n"


def _first(thing: Any) -> str:
    return plain(sentence((inspect.getdoc(thing) or "").split("\n\n")[0]))
