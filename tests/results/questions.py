"""Questions drawn by number, of every kind that there is: `answer("step 17")` are the results as plain data.

A kind is a function from a random generator to data of any type, or from a name (`answer("file t5-small.json")`).
`tests/results/plain.py` makes it readable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from tests.results.plain import plain
from topologies.reading import UserError

Question = Callable[[Any], Any]
KINDS: dict[str, Question] = {}


def question(asked: Question) -> Question:
    """Register a kind by the function's name."""
    KINDS[asked.__name__] = asked
    return asked


def one_of(draw: random.Random, names: Iterable[str]) -> str:
    """One of names to which others are added now and then: a new one changes what is drawn only where it is drawn itself."""
    number = draw.random()
    return max(names, key=lambda name: random.Random(f"{number} {name}").random())


def kinds() -> dict[str, Question]:
    """All kinds by name."""
    for room in ("steps", "planning", "runs", "parts", "orders", "traced", "cases", "files", "plans"):
        import_module(f"tests.results.{room}")
    return KINDS


def named() -> list[str]:
    """Every question that has a name: a new model type, algorithm, framework or case is asked without being drawn."""
    asked = kinds()
    from sim.collectives import algorithms
    from strategies.models.importers import model_type
    from tests.results.cases import CASES
    from tests.results.files import SAMPLES
    from tests.results.parts import MODELS
    from tests.results.plans import BASES, SIZES
    from tests.results.traced import CASES as MODULES

    names: dict[str, Iterable[str]] = {"algorithm": algorithms, "case": CASES, "defaults": model_type, "keys": model_type}
    names |= {
        "file": (path.name for path in MODELS.glob("*.json")),
        "model": SIZES,
        "plan": BASES,
        "reading": SAMPLES,
        "traced": MODULES,
    }
    assert names.keys() <= asked.keys()
    return [f"{kind} {name}" for kind, each in names.items() for name in sorted(each)]


def answer(name: str) -> dict[str, Any]:
    """The results of question "kind number" or "kind name", or why it is refused."""
    kind, _, which = name.partition(" ")
    try:
        return plain(kinds()[kind](random.Random(name) if which.isdecimal() else which))
    except UserError as error:
        return {"refused": str(error)}
