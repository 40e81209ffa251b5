"""The page of examples: every job of `examples/`, with what it is about and its file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def anchor(path: str) -> str:
    """The place of an example on the page: its path in `examples/` without what HTML would not take."""
    return re.sub(r"\W+", "-", path)


def examples_page() -> str:
    """Each file by its folder: the title that its first comment is, and its text."""
    parts = [
        "# Examples\n",
        "Jobs and clusters of the folder `examples/` of the source; `shardyard simulate examples/…` runs a job.\n",
    ]
    folder = None
    for path in sorted(EXAMPLES.rglob("*.yaml"), key=lambda path: (str(path.parent), path.name)):
        if path.parent != folder:
            folder = path.parent
            name = folder.relative_to(EXAMPLES).as_posix()
            parts.append(f"## {'First ones' if name == '.' else name.replace('_', ' ')}\n")
        where = path.relative_to(EXAMPLES).as_posix()
        text = path.read_text(encoding="utf-8").rstrip()
        parts.append(f"### {where} {{ #{anchor(where)} }}\n\n```yaml\n{text}\n```\n")
    return "\n".join(parts)
