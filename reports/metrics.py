"""The glossary: every metric once, with its definition, formula, unit and source.

The entries are in `metrics.yaml` beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.reading import UserError, load_yaml, nearest


@dataclass(frozen=True)
class Metric:
    """An entry of the glossary. key: path in `Summary.to_dict()`, or "" when it is not there; names: others that people use."""

    name: str
    key: str
    definition: str
    formula: str
    unit: str
    source: str
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any]) -> Metric:
        """The metric that an entry of `metrics.yaml` describes."""
        return cls(**{"name": name, "key": "", **entry, "names": tuple(entry.get("names", ()))})


METRICS = tuple(Metric.of(name, entry) for name, entry in load_yaml(Path(__file__).with_suffix(".yaml")).items())


def hint(label: str) -> str:
    """The definition of a metric, to be shown on hovering; "" where there is none."""
    try:
        return metric(label).definition
    except UserError:
        return ""


def _index() -> dict[str, Metric]:
    """Metrics by name, key and other names, folded; the first to claim a word has it."""
    index: dict[str, Metric] = {}
    for words in ((m.name for m in METRICS), (m.key for m in METRICS)):
        index |= {
            _folded(word): metric for word, metric in zip(words, METRICS, strict=True) if word and _folded(word) not in index
        }
    for metric in METRICS:
        for word in metric.names:
            index.setdefault(_folded(word), metric)
    return index


def _folded(word: str) -> str:
    """Without capitals, hyphens, underscores and spaces; with slashes and dots, which tell tokens/s and keys."""
    return "".join(letter for letter in word.strip().lower() if letter not in "-_ ")


def metric_names() -> list[str]:
    """Names of all metrics, in the order of the glossary."""
    return [metric.name for metric in METRICS]


def metric(name: str) -> Metric:
    """The entry of that name, key or other name, in any case. Raises UserError with the nearest name."""
    entry = _index().get(_folded(name))
    if entry is None:
        words = {word.lower() for metric in METRICS for word in (metric.name, metric.key, *metric.names) if word}
        hint = nearest(name.strip().lower(), words)
        known = f"; known: {', '.join(metric_names())}"
        raise UserError(f"unknown metric '{name}'{hint if 'did you mean' in hint else known}")
    return entry


def explain(name: str) -> str:
    """The entry for people, a few lines. Raises UserError with the nearest name."""
    entry = metric(name)
    lines = [entry.name, f"  {entry.definition}", f"  formula   {entry.formula}", f"  unit      {entry.unit}"]
    lines += [f"  source    {entry.source}", *([f"  JSON key  {entry.key}"] if entry.key else [])]
    return "\n".join(lines)
