"""Hooks of MkDocs: the reference is made from the code, and links to examples and source files lead to what the site has."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import shardyard  # noqa: E402
from reports.reference import pages  # noqa: E402
from reports.reference.examples import anchor  # noqa: E402

LINK = re.compile(r"\]\(((?:\.\./)+)(examples|README\.md)([^)#\s]*)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the reference."""
    for path, text in pages(shardyard).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/: examples are a page of the reference, the README is the first page."""
    folder = posixpath.dirname(page.file.src_uri)

    def led(match: re.Match[str]) -> str:
        if match[2] == "README.md":
            return f"]({posixpath.relpath('index.md', folder or '.')})"
        target = posixpath.relpath("reference/examples.md", folder or ".")
        return f"]({target}#{anchor(match[3].lstrip('/'))})"

    return LINK.sub(led, markdown)
