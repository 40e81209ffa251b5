"""Every block of every page of docs/ is executed; what it shows is what is printed now.

`python tests/test_samples.py [PAGE…]` writes it anew, with the pictures that pages draw.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))
import samples

from reports.figures import Drawing

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if samples.blocks(page.read_text(encoding="utf-8"))]


@pytest.fixture
def drawn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn from what pages show, and the first picture of a film; files of theirs have tests of their own."""

    def draw(drawing: Drawing, data: Any, path: Path, legend: bool = True) -> Path:
        if path.suffix == ".gif" and drawing.film is not None:
            next(iter(drawing.film(data)))
        drawing.figure(data)
        if path.suffix == ".svg":
            path.write_text("<svg/>")
        else:
            Image.new("1", (1, 1)).save(path)
        return path

    monkeypatch.setattr(Drawing, "__call__", draw)


@pytest.mark.usefixtures("drawn_only")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_the_page_shows_what_its_blocks_print(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == samples.run(text, tmp_path), f"run `python tests/test_samples.py {page.relative_to(ROOT)}`"


def test_what_differs_is_noticed(tmp_path: Path) -> None:
    page = "```python\nprint(6 * 7)\n```\n\n```text\n41\n```\n"
    assert samples.run(page, tmp_path) == page.replace("41", "42")


def test_options_that_are_not_there_are_noticed() -> None:
    samples.parse(["shardyard", "simulate", "examples/demo.yaml", "--nodes", "2"])
    with pytest.raises(Exception, match="No such option"):
        samples.parse(["shardyard", "simulate", "--knots", "2"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write what the blocks of pages print now, and pictures that they draw.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", default=list(map(str, PAGES)), help="by default all pages of docs/")
    for name in parser.parse_args().pages:
        with tempfile.TemporaryDirectory() as folder:
            samples.rewrite(Path(name), Path(folder))
            print(name)
