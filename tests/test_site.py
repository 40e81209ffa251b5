"""The documentation site: its reference knows every field, command and function, and it builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

import shardyard
from reports.commands import main
from reports.fields import described
from reports.glossary import terms
from reports.metrics import metric_names
from reports.reference import pages
from reports.reference.fields import fields_table
from reports.reference.markdown import plain
from sim.engine.effects import effects
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.resilience.settings import RunSettings
from topologies.cluster import Cluster
from topologies.fabric import fabrics
from topologies.reliability import Part, Reliability

ROOT = Path(__file__).resolve().parents[1]
CLASSES: list[type[BaseModel]] = [Plan, Model, Cluster, RunSettings, Reliability, Part]
CLASSES += [*(effects[name] for name in effects), *(fabrics[name] for name in fabrics)]


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return {Path(path).stem: text for path, text in pages(shardyard).items()}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_field_has_a_sentence(kind: type[BaseModel]) -> None:
    assert [field for field, _, about in described(kind) if not about] == []


@pytest.mark.parametrize(("page", "kind"), [("plan", Plan), ("model", Model), ("cluster", Cluster), ("run", RunSettings)])
def test_fields_are_in_the_reference_with_their_descriptions(reference: dict[str, str], page: str, kind: type[BaseModel]) -> None:
    for name, info in kind.model_fields.items():
        line = next(line for line in reference[page].splitlines() if line.startswith(f"| `{name}` |"))
        assert not info.description or plain(info.description) in line


def test_a_table_tells_values_and_defaults() -> None:
    rows = {line.split("`")[1]: line for line in fields_table(Cluster).splitlines()[2:]}
    assert "bytes/s, as `25 GB/s` or `400 Gb/s`" in rows["node.nic"]
    assert "| seconds, as `1.2 us` | `600 ns` | over NVLink |" in rows["node.latency.nvlink"]
    assert "| required |" in rows["node.gpu.memory"]


def test_every_command_and_option_is_in_the_reference(reference: dict[str, str]) -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert f"\n## {name}\n" in reference["commands"]
        for option in command.params:
            if isinstance(option, click.Option):
                assert f"`{option.opts[0]}`" in reference["commands"], (name, option.opts)


def test_every_public_name_is_in_the_reference(reference: dict[str, str]) -> None:
    told = set(re.findall(r"^## (\w+)$", reference["python"], re.MULTILINE))
    assert told >= set(shardyard.__all__) - {"__version__", "main"}


def test_metrics_and_terms_are_in_the_reference(reference: dict[str, str]) -> None:
    assert all(f"\n## {name}\n" in reference["metrics"] for name in metric_names())
    assert all(f"**{plain(term)}**: " in reference["terms"] for term in terms())


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs pip install 'shardyard[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages_there = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "tutorials/first-plan.html", "reference/plan.html", "reference/examples.html"} <= pages_there
    for page in (tmp_path / "site").rglob("*.html"):  # nothing is fetched from other machines
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//(?!shardyard)", text), page
