"""Pages of metrics and of the words of the field."""

from __future__ import annotations

from collections.abc import Iterator

from reports.glossary import terms
from reports.metrics import METRICS
from reports.reference.markdown import code, plain, sentence


def metrics_page() -> str:
    """Every metric with its definition, formula, unit, key and source."""
    return "\n".join(["# Metrics\n", "What numbers of an answer mean; `shardyard explain NAME` says the same.\n", *_metrics()])


def _metrics() -> Iterator[str]:
    for metric in METRICS:
        yield f"## {metric.name}\n\n{plain(sentence(metric.definition))}\n"
        facts = {
            "formula": plain(metric.formula),
            "unit": plain(metric.unit),
            "in JSON": code(metric.key),
            "source": plain(metric.source),
            "also": plain(", ".join(metric.names)),
        }
        yield "\n".join(f"* {name}: {text}" for name, text in facts.items() if text) + "\n"


def terms_page() -> str:
    """Words of distributed training and where they are here."""
    parts = ["# Terms\n", "Words of distributed training, and where they are here; `shardyard explain WORD` says the same.\n"]
    for term, entry in sorted(terms().items(), key=lambda pair: pair[0].lower()):
        names = f" Also: {plain(', '.join(entry['names']))}." if entry["names"] else ""
        see = f" See {plain(entry['see'])}." if "see" in entry else ""
        parts.append(f"**{plain(term)}**: {plain(entry['text'])}{names}{see}\n")
    return "\n".join(parts)
