"""Samples of documentation pages, executed: what a page shows is what its blocks print now.

A page is run from top to bottom in an empty folder in which `examples` is the one of the checkout:

* a block with `title="job.yaml"` is written to that file;
* `console` blocks are commands: `shardyard …` in this process, `python FILE` in another, `mkdir` and `cat` as said;
* `python` blocks share one namespace;
* a `text` block right behind one of these is what it printed (standard output); behind `<!-- first 8 lines -->` its beginning;
* a picture that the page shows and a block has written is that one.

A comment before a block says what is different: `<!-- parsed: takes minutes -->`, its commands are only read, with all their
options; `<!-- not run: needs a cluster -->`; `<!-- exit code 2 -->`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import shardyard  # noqa: E402

FENCE = re.compile(r"^(?P<note><!-- [^\n]* -->\n)?```(?P<kind>\w+)(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST = re.compile(r"<!-- first (\d+) lines? -->")
PICTURE = re.compile(r"!\[[^\]]*\]\(([\w.-]+\.(?:png|svg|gif))\)")
MORE = "…\n"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the comment before it, its title, and where its text is in the page."""

    kind: str
    note: str
    title: str
    body: str
    span: tuple[int, int]

    @property
    def only_parsed(self) -> bool:
        """Whether its commands are read but not run."""
        return self.note.startswith("<!-- parsed: ")

    @property
    def exit_code(self) -> int:
        """What its last command ends with."""
        found = re.search(r"exit code (\d+)", self.note)
        return int(found[1]) if found else 0


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page in their order."""
    return [
        Block(
            match["kind"],
            (match["note"] or "").strip(),
            title[1] if (title := re.search(r'title="([^"]+)"', match["info"])) else "",
            match["body"],
            match.span("body"),
        )
        for match in FENCE.finditer(text)
    ]


def commands(body: str) -> list[list[str]]:
    """Words of each command of a console block, without comments and without the folder of a virtual environment."""
    lines = (shlex.split(line, comments=True) for line in body.replace("\\\n", " ").splitlines())
    words = [part for line in lines for part in _split(line)]
    return [[command[0].removeprefix(".venv/bin/"), *command[1:]] for command in words if command]


def _split(words: list[str]) -> Iterator[list[str]]:
    """`a; b` is two commands."""
    command: list[str] = []
    for word in words:
        command.append(word.removesuffix(";"))
        if word.endswith(";"):
            yield command
            command = []
    yield command


def parse(words: list[str]) -> None:
    """Read a command of ours with all its options, and the examples it names, without running it. Raises what click raises."""
    if words[0] != "shardyard":
        return
    with click.Context(shardyard.main) as context:
        command = shardyard.main.get_command(context, words[1])
    assert command is not None, words[1]
    command.make_context(words[1], words[2:]).close()
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word.partition(":")[0]).exists(), word


def run(page: str, folder: Path) -> str:
    """Run a page's blocks in a folder; the page, with what they printed. Raises AssertionError where a command fails."""
    folder = folder / "work"  # whose name answers may tell
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    names: dict[str, Any] = {"__name__": "page"}
    parts, end, printed, behind = [], 0, None, -1
    for block in blocks(page):
        if block.kind == "text" and printed is not None and not re.search(r"\S", _between(page, behind, block)):
            parts += [page[end : block.span[0]], _shown(printed, block)]
            end = block.span[1]
        printed = _run(block, folder, names) if "not run: " not in block.note else None
        behind = block.span[1]
    return "".join([*parts, page[end:]])


def _between(page: str, behind: int, block: Block) -> str:
    """What stands between two blocks, but for the second one's comment and the fences."""
    text = page[behind : block.span[0]].removeprefix("```")
    return re.sub(r"<!-- [^\n]* -->|```text[^\n]*\n", "", text)


def _shown(printed: str, block: Block) -> str:
    first = FIRST.match(block.note)
    lines = printed.splitlines(keepends=True)
    return printed if first is None or len(lines) <= int(first[1]) else "".join(lines[: int(first[1])]) + MORE


def _run(block: Block, folder: Path, names: dict[str, Any]) -> str | None:
    """What a block prints; None of those that print nothing."""
    if block.title:
        (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.title).write_text(block.body, encoding="utf-8")
        return None
    if block.kind == "yaml":
        yaml.safe_load(block.body)
    elif block.kind == "json":
        json.loads(block.body)
    elif block.kind == "console":
        found = commands(block.body)
        if not block.only_parsed:
            return "".join(_call(words, folder, block.exit_code if words is found[-1] else 0) for words in found)
        for words in found:
            parse(words)
    elif block.kind == "python":
        output = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(output):
            exec(compile(block.body, "page", "exec"), names)
        return output.getvalue()
    return None


def _call(words: list[str], folder: Path, exit_code: int) -> str:
    """What a command prints, without the line about where the numbers come from."""
    if words[0] == "shardyard":
        with contextlib.chdir(folder):
            result = CliRunner().invoke(shardyard.main, words[1:])
        assert result.exit_code == exit_code, (words, result.output, result.exception)
        shown = result.output if exit_code else result.stdout
        return "".join(line for line in shown.splitlines(keepends=True) if not line.startswith("shardyard 0"))
    if words[0] == "cat":
        return (folder / words[1]).read_text(encoding="utf-8")
    if words[0] == "mkdir":
        (folder / words[-1]).mkdir(parents=True, exist_ok=True)
        return ""
    assert words[0] == "python", f"{words[0]}: cannot be run in a test; say why with <!-- not run: … -->"
    ended = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == exit_code, (words, ended.stderr)
    return ended.stdout


def rewrite(page: Path, folder: Path) -> None:
    """Write what the page's blocks print now, and the pictures that they draw, into the page and beside it."""
    text = page.read_text(encoding="utf-8")
    page.write_text(run(text, folder), encoding="utf-8")
    for name in PICTURE.findall(text):
        if (drawn := folder / "work" / name).exists():
            shutil.copyfile(drawn, page.parent / name)
