"""The README's sample is what its command prints now. `python tests/test_readme.py` writes it anew."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import shardyard

README = Path(__file__).parents[1] / "README.md"
SAMPLE = re.compile(
    r"(```console\n\.venv/bin/(shardyard simulate --model path/to/config\.json .*?)```\n\n```text\n)(.*?)```", re.DOTALL
)


def printed(command: str) -> str:
    """What the README's command prints of Llama-3.1 8B, without where the numbers come from and without a report."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    at = words.index("--report")
    del words[at : at + 2]
    words[words.index("path/to/config.json")] = "llama-3.1-8b"
    output = CliRunner().invoke(shardyard.main, words).output.splitlines()
    return "".join(f"{line}\n" for line in output if not line.startswith("shardyard "))


def test_the_sample_is_what_the_command_prints() -> None:
    fitted = SAMPLE.search(README.read_text(encoding="utf-8"))
    assert fitted is not None
    assert fitted[3] == printed(fitted[2]), "run `python tests/test_readme.py`"


if __name__ == "__main__":
    argparse.ArgumentParser(description="Write the README's sample anew.").parse_args()
    text = README.read_text(encoding="utf-8")
    README.write_text(SAMPLE.sub(lambda match: f"{match[1]}{printed(match[2])}```", text), encoding="utf-8")
