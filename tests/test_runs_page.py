"""The sample in docs/runs.md is what its command prints now. `python tests/test_runs_page.py` writes it anew."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "runs.md"
SAMPLE = re.compile(r"(```console\nshardyard (run .*?) +#.*?The first prints:\n\n```text\n)(.*?)```", re.DOTALL)


def printed(command: str) -> str:
    """What the command prints."""
    words = [sys.executable, "-c", "import shardyard; shardyard.main()", *shlex.split(command)]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300).stdout


def test_the_sample_is_what_the_command_prints() -> None:
    fitted = SAMPLE.search(PAGE.read_text(encoding="utf-8"))
    assert fitted is not None
    assert fitted[3] == printed(fitted[2]), "run `python tests/test_runs_page.py`"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SAMPLE.sub(lambda match: f"{match[1]}{printed(match[2])}```", text), encoding="utf-8")
