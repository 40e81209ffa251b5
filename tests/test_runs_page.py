"""Samples in docs/runs.md and docs/training-loop.md are what their commands print now. `python tests/test_runs_page.py` writes
them anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "runs.md", ROOT / "docs" / "training-loop.md"]
SAMPLE = re.compile(
    r"(```console\nshardyard ([^\n]*?)(?: +#[^\n]*)?\n[^`]*```\n\nThe first prints:\n\n```text\n)(.*?)```", re.DOTALL
)


def printed(command: str) -> str:
    """What the command prints."""
    words = [sys.executable, "-c", "import shardyard; shardyard.main()", *shlex.split(command)]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300).stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_sample_is_what_the_command_prints(page: Path) -> None:
    fitted = SAMPLE.search(page.read_text(encoding="utf-8"))
    assert fitted is not None
    assert fitted[3] == printed(fitted[2]), "run `python tests/test_runs_page.py`"


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(SAMPLE.sub(lambda match: f"{match[1]}{printed(match[2])}```", text), encoding="utf-8")
