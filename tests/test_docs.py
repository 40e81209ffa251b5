"""Pages for people lead somewhere: links, files and names that they mention are there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

import shardyard
from reports.reference import pages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MENTION = re.compile(r"`([\w./-]+\.(?:py|md|yaml|csv|png|svg))(?::([\w.]+))?`")
FOLDER = re.compile(r"`((?:topologies|sim|strategies|calibration|reports|docs|examples|tests)/[\w./-]*/)`")


@cache
def reference() -> dict[str, str]:
    """The pages that the site makes from the code, by their paths in docs/."""
    return pages(shardyard)


def prose(page: Path) -> str:
    """A page without its fenced samples."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def names(path: str) -> frozenset[str]:
    """Functions, classes and assigned names of a module, those of classes with a dot."""
    result: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                result.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                result.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, "")
    return frozenset(result)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    made = {ROOT / "docs" / path: text for path, text in reference().items()}
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        if other in made:
            assert not anchor or f"\n## {anchor}\n" in made[other], target
            continue
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_is_mentioned_is_there(page: Path) -> None:
    for path, name in MENTION.findall(prose(page)):
        if "/" in path and path.split("/")[0] not in ("path", "out"):
            assert (ROOT / path).exists(), path
            assert not name or name in names(path), f"{path}:{name}"
    for folder in FOLDER.findall(prose(page)):
        assert (ROOT / folder).is_dir(), folder


def test_what_contributing_adds_step_by_step_works() -> None:
    """The schedule, hook and collective of docs/contributing.md, each as it stands there, in a process of their own."""
    blocks = re.findall(r"^   ```python\n(.*?)^   ```", (ROOT / "docs/contributing.md").read_text(encoding="utf-8"), re.M | re.S)
    added = [textwrap.dedent(block) for block in blocks]
    use = """
        import shardyard
        from sim.collectives import Place, algorithms

        plan = {"pp": 2, "dp": 4, "schedule": "reverse-gpipe", "data_parallel": "ddp_last", "accumulation": 4, "sequence": 1024}
        job = shardyard.read_job(model="gpt2-1.5b", cluster="dgx-h100", plan=plan | {"algorithm": "all_reduce/leader"})
        assert shardyard.predict(job).volume["dp"].psi > 0
        assert algorithms["all_reduce/leader"](Place((0, 0, 1))).sent(3).tolist() == [2, 1, 1]
    """
    assert len(added) == 3
    code = "\n".join([*(f"exec({block!r}, {{'__name__': 'added'}})" for block in added), textwrap.dedent(use)])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1200
