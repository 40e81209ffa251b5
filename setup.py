"""How the wheel is built: the rooms, which are at the root of the checkout, are packages below `shardyard` in it.

`sim`, `reports` and their like would collide with other people's modules. So `from sim.program import Op` is written
`from shardyard.sim.program import Op` into the wheel, and shardyard.py is its `__init__.py`. In a checkout, which an editable
installation is, everything stays where it is, and `shardyard.sim` is `sim` (`topologies/documents/checkout.py`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOMS = ("topologies", "sim", "strategies", "calibration", "reports")
DATA = {
    "topologies": ["py.typed", "**/*.yaml"],
    "strategies": ["py.typed", "**/*.yaml"],
    "sim": ["py.typed", "**/*.yaml"],
    "calibration": ["py.typed", "**/*.yaml", "**/*.csv"],
    "reports": ["py.typed", "**/*.yaml", "**/templates/*", "explorer/static/*"],
}
IMPORT = re.compile(rf"^(\s*from )(?=(?:{'|'.join(ROOMS)})[. ])", re.MULTILINE)
NAME = re.compile(rf'(?<=")(?=(?:{"|".join(ROOMS)})(?:\.[a-z_0-9]+)+")(?![\w.]+\.(?:md|py|yaml)")')


def below(text: str) -> str:
    """Code with the rooms that it imports, or names in quotes, below `shardyard`."""
    return NAME.sub("shardyard.", IMPORT.sub(r"\1shardyard.", text))


class Build(build_py):
    """Modules as they are below `shardyard`."""

    def run(self) -> None:
        """All packages, and the mark by which type checkers read the types of `shardyard` and what is below it (PEP 561)."""
        super().run()
        (Path(self.build_lib) / "shardyard" / "py.typed").touch()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Those of a folder; the package itself is shardyard.py, and so is what `python -m shardyard` runs, as launchers do."""
        return (
            [("shardyard", "__init__", "shardyard.py"), ("shardyard", "__main__", "shardyard.py")]
            if package == "shardyard"
            else super().find_package_modules(package, package_dir)
        )

    def check_package(self, package: str, package_dir: str) -> str | None:
        """The package itself has no folder."""
        return "shardyard.py" if package == "shardyard" else super().check_package(package, package_dir)

    def build_module(self, module: str, module_file: str, package: str) -> object:
        """Copy a module with its imports below `shardyard`."""
        built = super().build_module(module, module_file, package)
        target = Path(self.get_module_outfile(self.build_lib, package.split("."), module))
        target.write_text(below(Path(module_file).read_text(encoding="utf-8")), encoding="utf-8")
        return built


found = find_packages(include=[f"{room}*" for room in ROOMS])
if any("editable" in word for word in sys.argv):
    setup(packages=found, py_modules=["shardyard"], package_data=DATA)
else:
    setup(
        packages=["shardyard", *(f"shardyard.{name}" for name in found)],
        package_dir={f"shardyard.{room}": room for room in ROOMS},
        package_data={f"shardyard.{room}": files for room, files in DATA.items()},
        cmdclass={"build_py": Build},
    )
