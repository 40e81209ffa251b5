"""The wheel: one package, `shardyard`, that answers without PyTorch and pandas; import paths in it are those of a checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import shardyard
import sim.program

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("topologies", "sim", "strategies", "calibration", "reports")
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "scipy", "pandas", "topologies", "sim", "strategies", "calibration", "reports"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built and unpacked where nothing of the checkout is beside it."""
    pytest.importorskip("setuptools", reason="builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # so that workers of pytest do not build in one folder
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "shardyard.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The installed command, without PyTorch, SciPy and the checkout."""
    code = f"{WITHOUT}\nimport shardyard\nassert shardyard.__file__.startswith({str(site)!r})\nshardyard.command_line()"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=300)


def test_there_is_one_package(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"shardyard"}
    (about,) = installed.glob("*.dist-info")
    assert (about / "top_level.txt").read_text().split() == ["shardyard"]


def test_nothing_of_it_is_imported_from_the_top_level(installed: Path) -> None:
    code = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(ROOMS)})\b", re.MULTILINE)
    assert [path for path in installed.rglob("*.py") if code.search(path.read_text(encoding="utf-8"))] == []


def test_data_of_rooms_are_in_it(installed: Path) -> None:
    assert (installed / "shardyard" / "py.typed").exists()
    for room in ROOMS:
        there = {path.relative_to(ROOT / room) for path in (ROOT / room).rglob("*.yaml")}
        assert there == {
            path.relative_to(installed / "shardyard" / room) for path in (installed / "shardyard" / room).rglob("*.yaml")
        }


JOB = ("--model", "gpt2-1.5b", "--cluster", "dgx-h100", "--set", "plan.data_parallel=zero1", "--set", "plan.sequence=1024")


def test_it_simulates_plans_and_reports_without_pytorch(installed: Path, tmp_path: Path) -> None:
    simulated = run(installed, tmp_path, "simulate", *JOB)
    assert simulated.returncode == 0, simulated.stderr
    assert " per step, " in simulated.stdout
    few = [word for field in ("tp=1", "pp=1", "microbatch=4", "recompute=none") for word in ("--vary", f"plan.{field}")]
    planned = run(installed, tmp_path, "plan", *JOB, *few, "--workers", "2", "--seconds", "60")
    assert planned.returncode == 0, planned.stderr
    assert "as arguments: " in planned.stdout
    parts = ("scaling", "clusters", "sensitivity", "published")
    reported = run(
        installed, tmp_path, "report", *JOB, "--output", "page", *(word for part in parts for word in ("--without", part))
    )
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "page" / "report.html").stat().st_size > 50_000
    assert (tmp_path / "page" / "timeline.csv").read_text().startswith("rank,ranks,stage,stream,op,kind,microbatch,launched,")


def test_what_needs_pandas_says_what_to_install_in_one_line(installed: Path, tmp_path: Path) -> None:
    answer = run(installed, tmp_path, "plan", *JOB, "--vary", "plan.tp=1", "--vary", "plan.pp=1", "--results", "table.csv")
    assert answer.returncode == 2
    assert "pandas is not installed, and this needs it: `pip install 'shardyard[pandas]'`" in answer.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "--output", "mine.yaml", "--quick"),
        ("simulate", "--model", f"{ROOT}/examples/modules/lenet.py:LeNet", "--input", "1x28x28", "--cluster", "dgx-h100"),
    ],
    ids=lambda words: words[0],
)
def test_what_needs_pytorch_says_what_to_install_in_one_line(installed: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    answer = run(installed, tmp_path, *words)
    assert answer.returncode == 2
    assert answer.stderr.strip().count("\n") == 0
    assert "pip install 'shardyard[torch]'" in answer.stderr


def test_the_import_path_of_the_wheel_is_that_of_the_checkout() -> None:
    """The same modules, not copies of them."""
    import shardyard.sim.program as below
    from shardyard.strategies.schedules import schedules

    from strategies import schedules as beside

    assert below is sim.program
    assert sim.program.__spec__ is not None
    assert sim.program.__spec__.name == sim.program.__name__ == "sim.program"
    assert schedules is beside.schedules
    assert shardyard.sim is sim  # type: ignore[attr-defined]


def test_launchers_start_it_as_a_module(installed: Path, tmp_path: Path) -> None:
    """`torchrun … -m shardyard`, as `--print-launch` writes it."""
    command = [sys.executable, "-m", "shardyard", "--version"]
    said = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(installed)}, capture_output=True, text=True, timeout=300)
    assert said.stdout.startswith("shardyard, version"), said.stderr
