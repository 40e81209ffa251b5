"""Names and paths reach a terminal as text: spelt out where they would do something to it."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from reports.commands._common import show
from reports.terminal import echo, printable

TITLE = "\x1b]0;mine\x07"  # sets the window's title
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\rb\x08\x7f\x9b", "a\\rb\\x08\\x7f\\x9b"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("\udcff.yaml", "\\udcff.yaml"),
        ("two lines\n\tΨ ≤ 3 · 模型", "two lines\n\tΨ ≤ 3 · 模型"),
    ],
)
def test_harmful_characters_are_spelt_out_and_others_left(text: str, shown: str) -> None:
    assert printable(text) == shown


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_only_its_own_colours_are_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Screen())
    table = Table(title=f"of {TITLE}")
    table.add_column(f"[/red]{TITLE}")
    table.add_row(f"[red]{TITLE}")
    show(Group(Text(TITLE, "bold red"), table, f"[/x]{TITLE} :smile:"))
    echo(f"wrote {TITLE}.svg")
    shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert shown.count("\\x1b") == 6
    assert all(part in shown for part in ("[red]", "[/red]", ":smile:", "\x1b[1;31m"))


def test_a_file_with_a_harmful_name_is_shown_on_a_terminal(tmp_path: Path) -> None:
    """The whole way, with a terminal: where output is none, what writes it takes colours away by itself."""
    (tmp_path / f"[red]{TITLE}.yaml").write_text("{model: gpt2-1.5b, cluster: dgx-h100}")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shardyard", "compare", f"[red]{TITLE}.yaml", "--also", "plan.data_parallel=zero3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # closed at the other end
            pass
    os.close(ours)
    assert process.returncode in (0, 2)
    assert b"\x1b]" not in shown
    assert b"[red]\\x1b]0;" in shown
    assert b"\x1b[1m" in shown
